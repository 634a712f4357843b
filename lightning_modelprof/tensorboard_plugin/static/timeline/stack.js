// A slice's recorded call stack: its own, that of the call that launched it, or the Python functions around it.

import { make } from "../dom.js";
import { openStack, placeButton } from "../html/places.js";

/** @typedef {import("./slices.js").Slices} Slices */

const HEADING = "call stack, innermost first:"; // in a detail, before its frames
const PYTHON = "python function";
const FRAME = /^(.*)\((\d+)\): (.*)$/s;
/** Frames in these are on the way to everything, as in Python's operator_costs.py. */
const LIBRARY =
  /^(?:(?:.*\/)?(?:site|dist)-packages\/)?(?:torch|lightning\/pytorch|lightning\/fabric|pytorch_lightning|lightning_fabric)\/|^(?:.*\/)?lightning_modelprof\//;

/**
 * A slice's detail lines, without its call stack.
 * @param {Slices} slices
 * @param {number} index
 */
export function detailOf(slices, index) {
  const detail = slices.details[slices.detail[index] ?? -1] ?? "";
  const lines = detail.split("\n");
  const at = lines.indexOf(HEADING);
  return { lines: (at < 0 ? lines : lines.slice(0, at)).filter(Boolean), frames: at < 0 ? [] : lines.slice(at + 1) };
}

/**
 * A slice's frames, innermost first: its own, else those of the nearest slice around it that has any, else the Python
 * functions around it. For a device slice, those of the call that launched it.
 * @param {Slices} slices all of them
 * @param {number} index
 * @returns {string[]}
 */
export function framesOf(slices, index) {
  const own = detailOf(slices, index).frames;
  if (own.length) return own;
  const launcher = slices.launch[index] ?? -1;
  const from = launcher >= 0 && !slices.isBatch[slices.category[launcher]] ? launcher : index;
  if (slices.lanes[slices.rowOf(from).lane].isDevice) return [];
  const around = slices.around(from);
  const frames = around.filter((at) => slices.categoryOf(at) === PYTHON).map((at) => slices.nameOf(at));
  if (frames.length) return frames;
  for (const at of around) {
    const recorded = detailOf(slices, at).frames;
    if (recorded.length) return recorded;
  }
  return [];
}

/**
 * A function, and its file and line in the form that editors take; "" if it's not a line of Python.
 * @param {string} frame
 */
function callOf(frame) {
  const [, file, line, name] = frame.match(FRAME) ?? [];
  return file === undefined ? { name: frame, at: "" } : { name, at: `${file}:${line}` };
}

/**
 * The innermost frame outside torch and Lightning, else the innermost one.
 * @param {string[]} frames
 */
export function lineOf(frames) {
  const lines = frames.filter((frame) => callOf(frame).at);
  return lines.find((frame) => !LIBRARY.test(frame.replaceAll("\\", "/"))) ?? lines[0] ?? "";
}

/**
 * A frame, with file and line that a click copies, and a button that opens its call stack.
 * @param {string} frame
 * @param {string[]} frames
 */
export function lineWithStack(frame, frames) {
  const { name, at } = callOf(frame);
  const button = make("button", { type: "button", class: "to-stack", "aria-haspopup": "dialog" }, "Call stack");
  button.addEventListener("click", () => openStack(button, frames.map(callOf)));
  const place = at ? [placeButton(at), " "] : [];
  return make("span", { class: "tl-frame" }, ...place, make("bdi", {}, name), " ", ...(frames.length ? [button] : []));
}
