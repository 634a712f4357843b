// Keyboard input: everything that the pointer can do.

import { make } from "../dom.js";
import { firstFrom } from "../sorted.js";

/** @typedef {import("./timeline_view.js").TimelineView} TimelineView */

const ZOOM = 1.4;
const PAN = 0.12; // share of the width

const HELP = [
  ["W, S", "zoom in or out at the pointer (or Ctrl/⌘+wheel)"],
  ["A, D", "move left or right (or drag, or Shift+wheel)"],
  ["← → ↑ ↓", "select the previous, next, outer or inner slice"],
  ["Enter", "zoom to the selected slice and what launched it, or what it launched"],
  ["F", "zoom to the selected slice (or double-click)"],
  ["L", "jump from a kernel to its launch or from a fetch to its batch, and back"],
  ["R", "select the time range of the selected slice, or the visible range"],
  ["Z", "zoom to the selected range"],
  ["[ ]", "zoom to the previous or next step"],
  ["0", "show the whole trace"],
  ["/", "search (Enter and Shift+Enter zoom to the next and previous match)"],
  ["N, P", "next or previous match"],
  ["Escape", "clear the selection"],
  ["?", "show this list"],
];

/**
 * @param {TimelineView} view
 * @param {AbortSignal} signal
 */
export function listenToKeys(view, signal) {
  const { canvas, help, root } = view.parts;
  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    // Outside the canvas, arrows scroll and Enter presses a button; letters and digits work everywhere.
    const target = /** @type {HTMLElement} */ (event.target);
    if (target !== canvas && (event.key.length > 1 || event.key === " " || target.closest("input, dialog"))) return;
    const act = actions(view)[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }, { signal });
  const rows = HELP.map(([keys, text]) => make("div", {}, make("dt", {}, keys), make("dd", {}, text)));
  const close = make("button", { type: "button", onclick: () => help.close() }, "Close");
  help.append(make("h2", {}, "Keyboard shortcuts"), make("dl", {}, ...rows), close);
}

/**
 * @param {TimelineView} view
 * @returns {Record<string, () => void>}
 */
function actions(view) {
  const { viewport, at: selected, slices, parts } = view;
  /** @type {[number, number]} */
  const time = selected >= 0 ? [slices.begin[selected], slices.end[selected]] : [viewport.begin, viewport.end];
  const still = view.pointed ?? (selected >= 0 ? time[0] : (time[0] + time[1]) / 2); // stays in place during a zoom
  const at = Math.min(viewport.width, Math.max(0, viewport.xOf(still)));
  /** @param {number} factor */
  const zoom = (factor) => {
    viewport.zoom(factor, at);
    view.changed();
  };
  /** @param {number} share */
  const pan = (share) => {
    viewport.pan(Math.round(share * viewport.width));
    view.changed();
  };
  return {
    w: () => zoom(1 / ZOOM), s: () => zoom(ZOOM), "+": () => zoom(1 / ZOOM), "-": () => zoom(ZOOM),
    a: () => pan(-PAN), d: () => pan(PAN),
    ArrowLeft: () => move(view, beside(view, -1)), ArrowRight: () => move(view, beside(view, 1)),
    ArrowUp: () => move(view, above(view)), ArrowDown: () => move(view, below(view)),
    Enter: () => view.zoomToLinked(), f: () => view.zoomToSlice(view.selected),
    l: () => view.selected >= 0 && jump(view, view.all.linkedTo(view.selected)),
    r: () => view.setRange(time),
    z: () => view.range && view.zoomTo(...view.range),
    "[": () => toStep(view, -1), "]": () => toStep(view, 1),
    "0": () => view.showAll(), Home: () => view.showAll(),
    "/": () => parts.search.focus(),
    n: () => view.nextFound(1), p: () => view.nextFound(-1),
    Escape: () => {
      view.setRange(null);
      view.select(-1);
    },
    "?": () => parts.help.showModal(),
  };
}

/**
 * @param {TimelineView} view
 * @param {number} index among visible slices; -1 stays
 */
function move(view, index) {
  jump(view, view.shown.placeOf(index));
}

/**
 * @param {TimelineView} view
 * @param {number} place index in the packed columns; -1 stays
 */
function jump(view, place) {
  if (place >= 0) view.jumpTo(place);
}

/**
 * @param {TimelineView} view
 * @param {number} direction
 */
function beside(view, direction) {
  const { slices, at: selected } = view;
  if (selected < 0) return first(view);
  const row = slices.rowOf(selected);
  const index = selected + direction;
  return index >= row.first && index < row.last ? index : -1;
}

/**
 * Where to start: the first slice in view.
 * @param {TimelineView} view
 */
function first({ layout, slices, viewport }) {
  for (const { row } of layout.rows) {
    const index = slices.mostIn(row, viewport.begin, viewport.end);
    if (index >= 0) return firstFrom(slices.begin, row.first, index, viewport.begin);
  }
  return -1;
}

/** @param {TimelineView} view */
function above(view) {
  const { slices, at: selected } = view;
  if (selected < 0) return first(view);
  const parent = slices.parentOf(selected);
  return parent >= 0 ? parent : nearby(view, -1);
}

/** @param {TimelineView} view */
function below(view) {
  const { slices, at: selected } = view;
  if (selected < 0) return first(view);
  const [child, last] = slices.childrenOf(selected);
  return child < last ? child : nearby(view, 1);
}

/**
 * The slice of the next lane that is nearest in time.
 * @param {TimelineView} view
 * @param {1 | -1} direction
 */
function nearby({ slices, at: selected, layout }, direction) {
  const { lane } = slices.rowOf(selected);
  const tops = layout.rows.filter(({ row }) => row.depth === 0).map(({ row }) => row);
  const row = tops[tops.findIndex((one) => one.lane === lane) + direction];
  if (!row) return -1;
  const time = slices.begin[selected];
  const after = firstFrom(slices.begin, row.first, row.last, time);
  const candidates = [after - 1, after].filter((index) => index >= row.first && index < row.last);
  /** @param {number} index */
  const distance = (index) => Math.max(slices.begin[index] - time, time - slices.end[index], 0);
  return candidates.reduce((best, index) => (best < 0 || distance(index) < distance(best) ? index : best), -1);
}

/**
 * @param {TimelineView} view
 * @param {1 | -1} direction
 */
function toStep(view, direction) {
  const { steps } = view.slices;
  const { begin, end } = view.viewport;
  const middle = (begin + end) / 2;
  const step = direction > 0 ? steps.find((one) => one.begin > middle) : steps.findLast((one) => one.end <= middle);
  if (step) view.zoomTo(step.begin, step.end);
}
