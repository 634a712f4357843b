// The legend: a button per category, which shows or hides its slices.

import { formatCount } from "../format.js";
import { make } from "../dom.js";

/** @typedef {import("./timeline_view.js").TimelineView} TimelineView */

/** Hidden until the reader shows them: they are more numerous than all others, and each is short. */
const FOLDED = ["python function"];

/**
 * Categories hidden at first.
 * @param {string[]} categories
 */
export function hiddenAtFirst(categories) {
  const folded = categories.filter((category) => FOLDED.includes(category));
  return new Set(folded.length < categories.length ? folded : []);
}

/**
 * @param {TimelineView} view
 */
export function fillLegend(view) {
  const { parts, palette, hidden, unpacked } = view;
  const focused = [...parts.legend.children].findIndex((child) => child.contains(document.activeElement));
  const counts = new Float64Array(unpacked.meta.categories.length);
  for (const category of /** @type {Float64Array} */ (unpacked.columns.get("category"))) counts[category] += 1;
  /** @type {string[]} */
  const categories = unpacked.meta.categories;
  const items = categories.map((category, place) => {
    const isShown = !hidden.has(category);
    const swatch = make("i", { style: `background: ${palette.swatchOf(place)}` });
    const [slices, them] = counts[place] === 1 ? ["slice", "it"] : ["slices", "them"];
    const title = `${formatCount(counts[place])} ${slices}; click to ${isShown ? "hide" : "show"} ${them}`;
    const attributes = { type: "button", class: "tl-kind", "aria-pressed": String(isShown), title };
    const onclick = () => view.toggleKind(category);
    return make("li", {}, make("button", { ...attributes, onclick }, swatch, make("bdi", {}, category)));
  });
  parts.legend.replaceChildren(...items.filter((_, place) => counts[place])); // only those in the trace
  if (focused >= 0) parts.legend.children[focused]?.querySelector("button")?.focus({ preventScroll: true });
}
