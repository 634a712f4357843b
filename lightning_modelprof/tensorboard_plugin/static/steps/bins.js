// Adjacent steps joined into a chart's points.

/**
 * @typedef {Object} Points a chart's points; all values of a point without steps are NaN
 * @property {number} size steps in each point but the last
 * @property {Float64Array} start first step of each point
 * @property {Float64Array} end one past its last step
 * @property {Float64Array} count steps that count in it
 * @property {Float64Array[]} layers mean time of each layer, in ns
 * @property {Float64Array} mean mean time of a step, in ns
 * @property {Float64Array} longest longest time of a step, in ns
 * @property {Float64Array} slowest the step that took it; -1 without steps
 * @property {Float64Array} leftOut share of all its steps that the benchmark excludes
 * @property {Float64Array} rate samples, or steps, per second
 */

/**
 * Join the steps from `first` to `last`, both inclusive, into at most `most` points of equal size.
 * @param {import("./data.js").Steps} all
 * @param {number} first
 * @param {number} last
 * @param {number} most
 * @param {boolean} onlyClean whether only clean steps count, with their times without the phase Profiler
 * @returns {Points}
 */
export function joinSteps(all, first, last, most, onlyClean) {
  const steps = onlyClean ? all.net : all;
  const size = Math.max(1, Math.ceil((last - first + 1) / Math.max(1, most)));
  const length = Math.ceil((last - first + 1) / size);
  const column = () => new Float64Array(length);
  const points = {
    size,
    start: column().map((_, point) => first + point * size),
    end: column().map((_, point) => Math.min(first + (point + 1) * size, last + 1)),
    count: column(),
    layers: steps.layers.map(column),
    mean: column(),
    longest: column(),
    slowest: column().fill(-1),
    leftOut: column(),
    rate: column(),
  };
  for (let point = 0; point < length; point += 1) joinPoint(steps, points, point, onlyClean);
  steps.layers.forEach((layer, place) => {
    for (const phase of layer.phases) {
      addMeans(points, points.layers[place], steps.phases[phase].times, onlyClean ? steps.exclusion : null);
    }
  });
  return points;
}

/**
 * Everything in a point except its layers.
 * @param {import("./data.js").Steps} steps
 * @param {Points} points
 * @param {number} point
 * @param {boolean} onlyClean
 */
function joinPoint(steps, points, point, onlyClean) {
  const { duration, samples, exclusion, hasSamples } = steps;
  const [start, end] = [points.start[point], points.end[point]];
  let count = 0;
  let leftOut = 0;
  let time = 0;
  let amount = 0;
  let slowest = -1;
  for (let step = start; step < end; step += 1) {
    if (exclusion[step]) {
      leftOut += 1;
      if (onlyClean) continue;
    }
    count += 1;
    time += duration[step];
    amount += hasSamples ? samples[step] : 1;
    if (slowest < 0 || duration[step] > duration[slowest]) slowest = step;
  }
  points.count[point] = count;
  points.leftOut[point] = leftOut / (end - start);
  points.mean[point] = time / count;
  points.slowest[point] = slowest;
  points.longest[point] = slowest < 0 ? NaN : duration[slowest];
  points.rate[point] = time > 0 ? (1e9 * amount) / time : NaN;
}

/**
 * Add the mean of a phase to that of a layer, for each point.
 * @param {Points} points
 * @param {Float64Array} means
 * @param {Float64Array} times
 * @param {Float64Array | null} exclusion steps with one don't count
 */
function addMeans({ start, end, count }, means, times, exclusion) {
  for (let point = 0; point < means.length; point += 1) {
    let sum = 0;
    for (let step = start[point]; step < end[point]; step += 1) {
      if (!exclusion || !exclusion[step]) sum += times[step];
    }
    means[point] += sum / count[point];
  }
}

const USUAL = 0.98;
const LEAST_FOR_OUTLIERS = 10;
const OUTLIER = 3;

/**
 * Where the y axis ends: high enough for all, unless a few are so high that the others would be invisible.
 * @param {ArrayLike<number>} heights of the stacks
 * @param {ArrayLike<number>} peaks highest value of each point
 */
export function axisTop(heights, peaks) {
  const [low, high] = [heights, peaks].map((values) => Float64Array.from(values).filter((value) => value > 0).sort());
  const usual = (/** @type {Float64Array} */ sorted) => sorted[Math.floor(USUAL * (sorted.length - 1))] ?? 0;
  const largest = high[high.length - 1] ?? 0;
  if (low.length < LEAST_FOR_OUTLIERS || largest <= OUTLIER * usual(low)) return largest * 1.04 || 1;
  return Math.max(1.5 * usual(low), Math.min(1.1 * usual(high), 2 * OUTLIER * usual(low)));
}
