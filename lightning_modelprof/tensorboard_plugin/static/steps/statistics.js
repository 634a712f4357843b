// Figures of the steps in a range, as docs/report.md defines them for the Perf Summary: what is of clean steps is
// without the time of the phase Profiler.

/** @typedef {import("./data.js").Steps} Steps */

/**
 * @typedef {Object} Figures of the clean steps of a range; null is not known
 * @property {number} steps all steps of the range
 * @property {number} clean clean ones, which all below is of
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
    if (!reader) continue; // it took no time in any step
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
 * The slowest steps, the slowest first; of equal ones the earlier.
 * @param {Steps} steps
 * @param {number} first
 * @param {number} last inclusive
 * @param {number} most
 * @param {boolean} onlyClean whether only clean steps count, by their times without the phase Profiler
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

/**
 * @typedef {Object} Cause how much more time a phase takes in slow steps
 * @property {string} key
 * @property {string} label
 * @property {number | null} slow mean over the slow steps, in ns; null where it was not measured
 * @property {number | null} others mean over the other steps, in ns
 * @property {number | null} more the difference
 * @property {number | null} share of the difference of whole steps
 */

/**
 * What makes slow steps slow: clean steps above a time, compared with the other clean ones.
 * @param {Steps} steps
 * @param {number} first
 * @param {number} last inclusive
 * @param {number} limit slow is above this, in ns
 * @returns {{slow: number, others: number, step: Cause, phases: Cause[]} | null} null when no step is slower
 */
export function causesOfSlowness({ net }, first, last, limit) {
  const group = { steps: net, first, last, limit };
  const [slow, others] = [countOf(group, true), countOf(group, false)];
  if (!slow || !others) return null;
  const compare = (/** @type {string} */ key, /** @type {string} */ label, /** @type {Float64Array} */ times) => {
    const [high, low] = [sumOf(group, true, times), sumOf(group, false, times)];
    const isKnown = high !== null && low !== null;
    return {
      key,
      label,
      slow: high === null ? null : high / slow,
      others: low === null ? null : low / others,
      more: isKnown ? high / slow - low / others : null,
    };
  };
  const step = { ...compare("step", "Step", net.duration), share: 1 };
  const phases = net.phases
    .map(({ key, label, times }) => compare(key, label, times))
    .filter((row) => row.slow !== 0 || row.others !== 0)
    .map((row) => ({ ...row, share: row.more === null || !step.more ? null : row.more / step.more }));
  phases.sort((a, b) => (b.more ?? -Infinity) - (a.more ?? -Infinity));
  return { slow, others, step, phases };
}

/** @typedef {{steps: Steps, first: number, last: number, limit: number}} Group */

/**
 * @param {Group} group
 * @param {boolean} isSlow
 */
function countOf({ steps, first, last, limit }, isSlow) {
  let count = 0;
  for (let step = first; step <= last; step += 1) {
    if (!steps.exclusion[step] && steps.duration[step] > limit === isSlow) count += 1;
  }
  return count;
}

/**
 * Sum of a phase over the clean steps that are slow, or that are not; null when one has no time.
 * @param {Group} group
 * @param {boolean} isSlow
 * @param {Float64Array} times
 */
function sumOf({ steps, first, last, limit }, isSlow, times) {
  let sum = 0;
  for (let step = first; step <= last; step += 1) {
    if (steps.exclusion[step] || steps.duration[step] > limit !== isSlow) continue;
    if (times[step] < 0) return null;
    sum += times[step];
  }
  return sum;
}

const MOST_BARS = 60;

/**
 * @typedef {Object} Bars of a histogram
 * @property {number} low where the first bar begins, in ns
 * @property {number} width of a bar, in ns
 * @property {number[]} counts
 * @property {number} beyond how many steps are above the last bar
 */

/**
 * Bars as in the chart "Step times" of report.html: as wide as the narrower of Freedman-Diaconis and Sturges,
 * at most 60; where the slowest step took more than twice the 99th percentile they end there.
 * @param {Float64Array} sorted ascending
 * @returns {Bars | null} null without steps
 */
export function histogram(sorted) {
  const tail = percentile(sorted, 99);
  if (tail === null) return null;
  const end = sorted[sorted.length - 1] > 2 * tail ? tail : sorted[sorted.length - 1];
  let count = sorted.length;
  while (sorted[count - 1] > end) count -= 1;
  const shown = sorted.subarray(0, count);
  const range = end - shown[0];
  if (!(range > 0)) return { low: end * 0.99, width: end * 0.02 || 1, counts: [count], beyond: sorted.length - count };
  const spread = (percentile(shown, 75) ?? 0) - (percentile(shown, 25) ?? 0);
  const sturges = range / (Math.log2(count) + 1);
  const width = spread > 0 ? Math.min((2 * spread) / Math.cbrt(count), sturges) : sturges;
  const bars = Math.max(1, Math.min(MOST_BARS, Math.ceil(range / width)));
  const counts = new Array(bars).fill(0);
  for (const time of shown) counts[Math.min(bars - 1, Math.floor(((time - shown[0]) / range) * bars))] += 1;
  return { low: shown[0], width: range / bars, counts, beyond: sorted.length - count };
}
