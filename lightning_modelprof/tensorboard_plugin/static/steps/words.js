// Rates, shares and labels of axes as text; durations and counts are written by ../format.js.

import { DASH, formatCount } from "../format.js";

/**
 * A rate as show/format.py writes it: "4,939", "12.3".
 * @param {number | null} value
 */
export function formatRate(value) {
  if (value === null || !Number.isFinite(value)) return DASH;
  return value >= 1000 ? formatCount(Math.round(value)) : withDigits(value, 3);
}

/**
 * A share in percent: "40.22 %".
 * @param {number | null} share
 */
export function formatShare(share) {
  if (share === null || !Number.isFinite(share)) return DASH;
  return share === 0 ? "0 %" : `${withDigits(100 * share, 1)} %`;
}

/**
 * At least two decimals and so many digits that nothing rounds to zero.
 * @param {number} value
 * @param {number} digits
 */
function withDigits(value, digits) {
  if (value === 0) return "0";
  const exponent = Number(value.toExponential().split("e")[1]);
  return value.toFixed(Math.min(20, Math.max(2, digits - 1 - exponent)));
}

/** @type {[number, string][]} */
const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "us"], [1, "ns"]];

/**
 * The unit of an axis of durations, and how many ns it has.
 * @param {number} largest in ns
 * @returns {[number, string]}
 */
export function durationUnit(largest) {
  return UNITS.find(([ns]) => largest >= ns) ?? UNITS[UNITS.length - 1];
}

/**
 * Labels of an axis with as many decimals as their neighbours.
 * @param {number[]} values
 * @param {number} [scale] how many of the values' units one of the axis has
 * @param {boolean} [isPlace] whether they number something, so that they have no thousands separators
 */
export function tickLabels(values, scale = 1, isPlace = false) {
  const step = values.length > 1 ? (values[1] - values[0]) / scale : 1;
  // A step of 2.5 needs a decimal, and one of 0.25 two.
  const decimals = [0, 1, 2, 3, 4, 5].find((digits) => isWhole(step * 10 ** digits)) ?? 6;
  return values.map((value) => {
    const text = (value / scale).toFixed(decimals);
    return isPlace ? text : text.replace(/\B(?=(\d{3})+(?!\d))(?<!\.\d*)/g, ",");
  });
}

/** @param {number} value */
function isWhole(value) {
  return value > 0.5 && Math.abs(value - Math.round(value)) < 1e-6;
}
