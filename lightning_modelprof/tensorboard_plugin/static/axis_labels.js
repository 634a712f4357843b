// Labels of axes, with as many decimals as their neighbours; other numbers are written by format.js.

/** @type {[number, string][]} */
const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "us"], [1, "ns"]];

/**
 * The unit of an axis of durations: how many ns it has, and its name.
 * @param {number} ns what is to be at least one of it
 * @returns {[number, string]}
 */
export function durationUnit(ns) {
  return UNITS.find(([scale]) => ns >= scale) ?? UNITS[UNITS.length - 1];
}

/**
 * Labels of an axis of durations, in the unit of the largest.
 * @param {number[]} values in ns, ascending
 */
export function durationLabels(values) {
  const [scale, unit] = durationUnit(values[values.length - 1] ?? 0);
  return tickLabels(values, scale).map((text) => `${text} ${unit}`);
}

/**
 * Labels of an axis.
 * @param {number[]} values equally far from each other, ascending
 * @param {number} [scale] how many of the values' units one of the axis has
 */
export function tickLabels(values, scale = 1) {
  const step = values.length > 1 ? (values[1] - values[0]) / scale : 1;
  // A step of 2.5 needs a decimal, and one of 0.25 two.
  const decimals = [0, 1, 2, 3, 4, 5].find((digits) => isWhole(step * 10 ** digits)) ?? 6;
  return values.map((value) => (value / scale).toFixed(decimals).replace(/\B(?=(\d{3})+(?!\d))(?<!\.\d*)/g, ","));
}

/** @param {number} value */
function isWhole(value) {
  return value > 0.5 && Math.abs(value - Math.round(value)) < 1e-6;
}
