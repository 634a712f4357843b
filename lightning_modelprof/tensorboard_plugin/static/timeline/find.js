// Targets of links: slices by exact name, category or both, or a step.

import { formatCount } from "../format.js";
import { showFound } from "./toolbar.js";

/** @typedef {import("./timeline_view.js").TimelineView} TimelineView */
/** @typedef {{name?: string, kind?: string, step?: number, rank?: number}} Find */

const MARGIN = 1; // durations of the slice to show before and after it

/**
 * @param {any} find from a link
 * @returns {Find | null}
 */
export function checkedFind(find) {
  if (typeof find !== "object" || find === null) return null;
  const { name, kind, step, rank } = find;
  const found = {
    ...(typeof name === "string" && { name }), ...(typeof kind === "string" && { kind }),
    ...(Number.isInteger(step) && { step }), ...(Number.isInteger(rank) && { rank }),
  };
  return "name" in found || "kind" in found || "step" in found ? found : null;
}

/**
 * A link's target, in words.
 * @param {Find} find
 */
export function labelOf({ name, kind }) {
  return name ?? kind ?? "";
}

/**
 * Mark a link's target, select its longest slice, and show that with some context.
 * @param {TimelineView} view
 * @param {Find} find
 * @param {boolean} isNew whether to go there; a reader who comes back has moved on since
 */
export function showFind(view, find, isNew) {
  if (find.name === undefined && find.kind === undefined) {
    if (isNew) showStep(view, /** @type {number} */ (find.step));
    return;
  }
  reveal(view, find);
  view.mark(find);
  const what = `${find.kind ?? "slice"}${find.name === undefined ? "" : ` named “${find.name}”`}`;
  const { count, longest } = view.found;
  const marked = `${formatCount(count)} ${count === 1 ? "slice" : "slices"} marked${count > 1 ? ", the longest selected" : ""}.`;
  view.parts.message.textContent = !count ? `This trace has no ${what}.` : isNew ? marked : "";
  if (isNew && longest >= 0) {
    const [begin, end] = [view.slices.begin[longest], view.slices.end[longest]];
    view.viewport.show(begin - MARGIN * (end - begin), end + MARGIN * (end - begin));
    view.jumpTo(view.shown.placeOf(longest));
  }
  showFound(view);
}

/**
 * @param {TimelineView} view
 * @param {number} number
 */
function showStep(view, number) {
  const step = view.slices.steps.find((one) => one.number === number);
  view.parts.message.textContent = step ? "" : `This trace has no step ${number}.`;
  if (step) view.zoomTo(step.begin, step.end);
}

/**
 * Show the hidden categories that a link points at.
 * @param {TimelineView} view
 * @param {Find} find
 */
function reveal(view, { name, kind }) {
  const { unpacked, hidden } = view;
  if (!hidden.size) return;
  const { categories, names } = unpacked.meta;
  let wanted = new Set(kind === undefined ? [] : [kind]);
  if (name !== undefined && kind === undefined) {
    const number = names.indexOf(name);
    const [of, category] = ["name", "category"].map((key) => /** @type {Float64Array} */ (unpacked.columns.get(key)));
    wanted = new Set();
    of.forEach((one, place) => one === number && wanted.add(categories[category[place]]));
    if ([...wanted].some((one) => !hidden.has(one))) return; // some of it is visible
  }
  const left = [...hidden].filter((one) => !wanted.has(one));
  if (left.length < hidden.size) view.hide(left);
}
