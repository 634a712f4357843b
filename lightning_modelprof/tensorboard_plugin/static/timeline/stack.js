// The call stack of a slice, as far as it was recorded: its own, that of the call that launched it, or the Python
// functions around it.

import { copyText } from "../html/copying.js";
import { make } from "../dom.js";

/** @typedef {import("./slices.js").Slices} Slices */

const HEADING = "call stack, innermost first:"; // in a detail, before its frames
const COPY = "Copy";
const SEEN_MS = 2000;
const PYTHON = "python function";
const FRAME = /^(.*)\((\d+)\): (.*)$/s;
/** Whose frames are on the way to everything, as Python's operator_costs.py has them. */
const LIBRARY =
  /^(?:(?:.*\/)?(?:site|dist)-packages\/)?(?:torch|lightning\/pytorch|lightning\/fabric|pytorch_lightning|lightning_fabric)\/|^(?:.*\/)?lightning_modelprof\//;

/**
 * What is known of a slice, in lines, without its call stack.
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
 * The frames of a slice, innermost first: its own, else those of the nearest slice around it that has any, else the
 * Python functions around it. Of a slice of a device those of the call that launched it.
 * @param {Slices} slices all of them
 * @param {number} index
 * @returns {string[]}
 */
export function framesOf(slices, index) {
  const own = detailOf(slices, index).frames;
  if (own.length) return own;
  const launcher = slices.launch[index] ?? -1;
  const from = launcher >= 0 ? launcher : index;
  if (slices.lanes[slices.rowOf(from).lane].isDevice) return [];
  const around = [];
  for (let at = from; at >= 0; at = slices.parentOf(at)) around.push(at);
  const frames = around.filter((at) => slices.categoryOf(at) === PYTHON).map((at) => slices.nameOf(at));
  if (frames.length) return frames;
  for (const at of around) {
    const recorded = detailOf(slices, at).frames;
    if (recorded.length) return recorded;
  }
  return [];
}

/**
 * File and line of a frame, as editors take them; "" of what is no line of Python.
 * @param {string} frame
 */
export function placeOf(frame) {
  const [, file, line] = frame.match(FRAME) ?? [];
  return file === undefined ? "" : `${file}:${line}`;
}

/**
 * The innermost frame outside torch and Lightning, else the innermost one.
 * @param {string[]} frames
 */
export function lineOf(frames) {
  return frames.find((frame) => placeOf(frame) && !LIBRARY.test(frame.replaceAll("\\", "/"))) ?? frames.find(placeOf) ?? "";
}

/**
 * A frame with a button that copies its file and line.
 * @param {string} frame
 * @param {(text: string) => void} say
 */
export function frameWithCopy(frame, say) {
  const place = placeOf(frame);
  const text = make("bdi", {}, frame);
  if (!place) return make("span", { class: "tl-frame" }, text);
  const attributes = { type: "button", class: "tl-copy", title: `Copy ${place}`, "aria-label": `Copy ${place}` };
  const button = make("button", { ...attributes, onclick: () => copy() }, COPY);
  const copy = async () => {
    const isDone = await copyText(place);
    button.textContent = isDone ? "Copied" : "The browser does not let this page copy";
    say(isDone ? `Copied ${place}` : button.textContent);
    setTimeout(() => (button.textContent = COPY), SEEN_MS);
  };
  return make("span", { class: "tl-frame" }, text, button);
}

/**
 * All frames, behind a line that opens them.
 * @param {string[]} frames
 * @param {(text: string) => void} say
 */
export function stackFlyout(frames, say) {
  const items = frames.map((frame) => make("li", {}, frameWithCopy(frame, say)));
  const count = `Call stack: ${frames.length} ${frames.length === 1 ? "frame" : "frames"}, innermost first`;
  return make("details", { class: "tl-stack" }, make("summary", {}, count), make("ol", {}, ...items));
}
