// Where the time axis has its marks, and what they say.

import { durationUnit, formatTick } from "../format.js";
import { niceStep } from "../nice_step.js";

const ROOM = 95; // pixels from mark to mark
const MOST_DIGITS = 5;

/** @typedef {{base: string, marks: {time: number, label: string}[]}} Axis `base`: what the marks count from, or "" */

/**
 * @param {import("./viewport.js").Viewport} viewport
 * @returns {Axis}
 */
export function axisOf({ begin, end, first, perPixel }) {
  const step = niceStep(ROOM * perPixel);
  const [scale, unit] = durationUnit(step);
  // Far from the trace's begin the digits of all marks would be the same but the last ones.
  const isLong = (end - first) / scale >= 10 ** MOST_DIGITS;
  const block = scale * 1000;
  const base = isLong ? Math.floor((begin - first) / block) * block : 0;
  const marks = [];
  for (let at = Math.ceil((begin - first) / step); first + at * step <= end; at += 1) {
    const value = formatTick((at * step - base) / scale, 1);
    marks.push({ time: first + at * step, label: `${isLong ? "+" : ""}${value} ${unit}` });
  }
  return { base: isLong ? `${formatTick(base / 1e9, Math.min(1, block / 1e9))} s` : "", marks };
}
