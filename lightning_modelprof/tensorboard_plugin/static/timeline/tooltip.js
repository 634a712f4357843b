// A short tooltip for the slice under the pointer, and the counters' values at that time.

import { make } from "../dom.js";
import { formatBytes, formatCount, formatDuration, formatRatio } from "../format.js";
import { firstAbove } from "../sorted.js";
import { detailOf } from "./stack.js";

/** @typedef {import("./timeline_view.js").TimelineView} TimelineView */

const GAP = 14; // pixels from the pointer

/**
 * @param {TimelineView} view
 * @param {number} x of the pointer, in the stage
 * @param {number} y
 * @param {number} place index of the slice in the packed columns, -1 for none
 */
export function showTooltip({ parts, slices, shown }, x, y, place) {
  const index = shown.indexOf(place);
  const { tooltip, stage } = parts;
  tooltip.hidden = index < 0;
  if (index < 0) return;
  const known = slices.isBatch[slices.category[index]] ? detailOf(slices, index).lines : [];
  const words = [formatDuration(slices.duration[index]), slices.categoryOf(index), ...known];
  tooltip.replaceChildren(
    make("b", { dir: "auto" }, slices.nameOf(index)),
    make("span", {}, words.join(" · "))
  );
  const left = x + GAP + tooltip.offsetWidth > stage.clientWidth ? x - GAP - tooltip.offsetWidth : x + GAP;
  const top = y + GAP + tooltip.offsetHeight > stage.clientHeight ? y - GAP - tooltip.offsetHeight : y + GAP;
  tooltip.style.left = `${Math.max(0, left)}px`;
  tooltip.style.top = `${Math.max(0, top)}px`;
}

/**
 * Each counter's value at the pointer's time, next to its label.
 * @param {TimelineView} view
 */
export function showValues({ parts, layout, slices, pointed }) {
  layout.items.forEach((item, place) => {
    if (item.kind !== "counter") return;
    const value = parts.lanes.children[place]?.querySelector(".tl-value");
    const { times, values, unit } = slices.counters[item.place];
    const at = pointed === null ? -1 : firstAbove(times, 0, times.length, pointed) - 1;
    if (value) value.textContent = at < 0 ? "" : amount(values[at], unit);
  });
}

/**
 * @param {number} value
 * @param {string} unit a value of Python's units.Unit
 */
function amount(value, unit) {
  if (unit === "bytes") return formatBytes(value);
  if (unit === "ratio") return formatRatio(value);
  return unit === "ns" ? formatDuration(value) : formatCount(value);
}
