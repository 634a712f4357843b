// Figures of a dragged range of steps, as docs/report.md defines them for the Perf Summary: figures of clean steps
// exclude the time of the phase Profiler. Python provides those of the whole run.

/** @typedef {import("./data.js").Steps} Steps */

/**
 * @typedef {Object} Figures of a range's clean steps; null if unknown
 * @property {number} steps all steps of the range
 * @property {number} clean clean ones, which everything below is over
 * @property {Float64Array} sorted their times in ns, ascending
 * @property {number | null} mean
 * @property {number | null} p50
 * @property {number | null} p90
 * @property {number | null} p99
 * @property {number | null} stepsPerS
 * @property {number | null} samplesPerS
 * @property {number | null} readerRatio
 */

/**
 * Linear interpolation between the two nearest values.
 * @param {Float64Array} sorted ascending
 * @param {number} percent
 * @returns {number | null}
 */
function percentile(sorted, percent) {
  if (!sorted.length) return null;
  const place = (percent / 100) * (sorted.length - 1);
  const below = sorted[Math.floor(place)];
  return below + (sorted[Math.ceil(place)] - below) * (place - Math.floor(place));
}

/**
 * @param {Steps} steps
 * @param {number} first
 * @param {number} last inclusive
 * @returns {Figures}
 */
export function rangeFigures(steps, first, last) {
  const { samples, exclusion } = steps;
  const { duration } = steps.net;
  const reader = steps.phases.find((phase) => phase.key === "dataloader")?.times;
  const times = new Float64Array(last - first + 1);
  let clean = 0;
  let total = 0;
  let amount = 0;
  let waited = 0;
  let hasSamples = true;
  let hasReader = true;
  for (let step = first; step <= last; step += 1) {
    if (exclusion[step]) continue;
    times[clean] = duration[step];
    total += times[clean];
    clean += 1;
    if (samples[step] < 0) hasSamples = false;
    else amount += samples[step];
    if (!reader) continue; // took no time in any step
    if (reader[step] < 0) hasReader = false;
    else waited += reader[step];
  }
  const sorted = times.subarray(0, clean).sort();
  return {
    steps: last - first + 1,
    clean,
    sorted,
    mean: clean ? total / clean : null,
    p50: percentile(sorted, 50),
    p90: percentile(sorted, 90),
    p99: percentile(sorted, 99),
    stepsPerS: total ? (1e9 * clean) / total : null,
    samplesPerS: total && hasSamples ? (1e9 * amount) / total : null,
    readerRatio: total && hasReader ? waited / total : null,
  };
}

/**
 * The slowest steps, slowest first; for equal times, the earlier one.
 * @param {Steps} steps
 * @param {number} first
 * @param {number} last inclusive
 * @param {number} most
 * @param {boolean} onlyClean whether only clean steps count, with their times without the phase Profiler
 * @returns {number[]}
 */
export function slowestSteps(steps, first, last, most, onlyClean) {
  const { duration, exclusion } = onlyClean ? steps.net : steps;
  /** @type {number[]} */
  const found = [];
  for (let step = first; step <= last; step += 1) {
    if (onlyClean && exclusion[step]) continue;
    if (found.length === most && duration[step] <= duration[found[most - 1]]) continue;
    const place = found.findIndex((other) => duration[step] > duration[other]);
    found.splice(place < 0 ? found.length : place, 0, step);
    if (found.length > most) found.pop();
  }
  return found;
}

/** @typedef {{label: string, slow: number | null, others: number | null, more: number | null}} Cause means in ns */

/**
 * Each phase of clean steps above a time limit, compared with the other clean ones.
 * @param {Steps} steps
 * @param {number} first
 * @param {number} last inclusive
 * @param {number} limit slow steps are above it, in ns
 * @returns {{slow: number, others: number, step: Cause, phases: Cause[]} | null} null if no step is slower
 */
export function causesOfSlowness({ net }, first, last, limit) {
  /** @type {[number[], number[]]} */
  const [slow, others] = [[], []];
  for (let step = first; step <= last; step += 1) {
    if (!net.exclusion[step]) (net.duration[step] > limit ? slow : others).push(step);
  }
  if (!slow.length || !others.length) return null;
  const compare = (/** @type {string} */ label, /** @type {Float64Array} */ times) => {
    const [high, low] = [slow, others].map((group) =>
      group.some((step) => times[step] < 0) ? null : group.reduce((sum, step) => sum + times[step], 0) / group.length,
    );
    return { label, slow: high, others: low, more: high === null || low === null ? null : high - low };
  };
  const phases = net.phases.map(({ label, times }) => compare(label, times));
  const shown = phases.filter((row) => row.slow !== 0 || row.others !== 0);
  shown.sort((a, b) => (b.more ?? -Infinity) - (a.more ?? -Infinity));
  return { slow: slow.length, others: others.length, step: compare("Step", net.duration), phases: shown };
}

const MOST_BARS = 60;

/**
 * Bars as wide as the narrower of Freedman-Diaconis and Sturges. If the slowest step took more than twice the 99th
 * percentile, they end there, and `beyond` counts the steps above.
 * @param {Float64Array} sorted times in ns, ascending
 */
export function histogram(sorted) {
  const tail = percentile(sorted, 99);
  if (tail === null) return null;
  const most = sorted[sorted.length - 1];
  const end = most > 2 * tail ? tail : most;
  const shown = sorted.filter((time) => time <= end);
  const [low, range, beyond] = [shown[0], end - shown[0], sorted.length - shown.length];
  if (!range) return { low: end * 0.99, width: end * 0.02 || 1, counts: [shown.length], beyond };
  const spread = (percentile(shown, 75) ?? 0) - (percentile(shown, 25) ?? 0);
  const width = Math.min((2 * spread) / Math.cbrt(shown.length) || Infinity, range / (Math.log2(shown.length) + 1));
  const bars = Math.min(MOST_BARS, Math.ceil(range / width));
  const counts = new Array(bars).fill(0);
  for (const time of shown) counts[Math.min(bars - 1, Math.floor(((time - low) / range) * bars))] += 1;
  return { low, width: range / bars, counts, beyond };
}
