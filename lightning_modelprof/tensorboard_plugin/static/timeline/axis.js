// The marks of the time axis, and their labels.

import { durationUnit, formatTick } from "../format.js";
import { niceStep } from "../nice_step.js";

const ROOM = 95; // pixels between marks
const MOST_DIGITS = 5;

/** @typedef {{base: string, marks: {time: number, label: string}[]}} Axis `base`: the time that the marks count from, or "" */

/**
 * @param {import("./viewport.js").Viewport} viewport
 * @returns {Axis}
 */
export function axisOf({ begin, end, first, perPixel }) {
  const step = niceStep(ROOM * perPixel);
  const [scale, unit] = durationUnit(step);
  // Far from the trace's start, all marks would share all but their last digits.
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
