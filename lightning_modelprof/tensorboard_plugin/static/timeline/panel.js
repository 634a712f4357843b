// What is known of the selected slice and of the selected stretch of time.

import { button, element } from "./dom.js";
import { formatCount, formatDuration } from "../format.js";
import { rangeSums } from "./range_sums.js";

/** @typedef {import("./timeline_view.js").TimelineView} TimelineView */

const MOST_LINKS = 20;
const MOST_ROWS = 30;
const DEFINITION =
  "Durations of the slices, clipped to the range and added up. What lies inside another slice, or beside it in " +
  "another lane, counts again.";

/**
 * @param {TimelineView} view
 * @param {HTMLElement} place
 */
export function showSelection(view, place) {
  const { slices, selected } = view;
  if (selected < 0) {
    const notes = slices.notes.map((text) => element("p", { class: "tl-hint", text }));
    place.replaceChildren(element("p", { class: "tl-hint", text: "Click a slice for what is known of it." }), ...notes);
    return;
  }
  const lane = slices.lanes[slices.rowOf(selected).lane];
  const step = slices.stepAt(slices.begin[selected]);
  const list = element("dl");
  /**
   * @param {string} label
   * @param {...(Node | string)} values
   */
  const add = (label, ...values) => {
    list.append(element("div", {}, element("dt", { text: label }), element("dd", {}, ...values)));
  };
  add("Category", slices.categoryOf(selected));
  add("Lane", element("bdi", { text: lane.label }));
  add("Begin", formatDuration(slices.begin[selected] - slices.traceBegin));
  add("Duration", formatDuration(slices.duration[selected]));
  add("Self time", formatDuration(slices.selfTime(selected)));
  add("Step", step ? String(step.number) : "in no step");
  const launcher = slices.launch[selected] ?? -1;
  if (launcher >= 0) {
    add("Launched by", link(view, launcher));
    add("Launch to begin", formatDuration(slices.begin[selected] - slices.begin[launcher]));
  }
  const launches = slices.launchesOf(selected);
  if (launches.length) {
    const more = launches.length - MOST_LINKS;
    add("Launches", ...launches.slice(0, MOST_LINKS).map((index) => link(view, index)),
      more > 0 ? `and ${formatCount(more)} more` : "");
  }
  const detail = slices.details[slices.detail[selected] ?? -1];
  place.replaceChildren(
    element("h3", {}, element("bdi", { text: slices.nameOf(selected) })),
    list,
    ...(detail ? [element("pre", { class: "tl-detail", text: detail, tabindex: "0" })] : [])
  );
}

/**
 * @param {TimelineView} view
 * @param {number} index
 */
function link(view, index) {
  return button(view.slices.nameOf(index), () => view.jumpTo(index), { class: "tl-link", dir: "auto" });
}

/**
 * The words for somebody who listens.
 * @param {TimelineView} view
 */
export function spoken({ slices, selected }) {
  if (selected < 0) return "Nothing is selected.";
  const step = slices.stepAt(slices.begin[selected]);
  return [
    slices.nameOf(selected), slices.categoryOf(selected), formatDuration(slices.duration[selected]),
    slices.lanes[slices.rowOf(selected).lane].label, ...(step ? [`step ${step.number}`] : []),
  ].join(", ");
}

/**
 * @param {TimelineView} view
 * @param {HTMLElement} place
 */
export function showRange(view, place) {
  const { slices, range } = view;
  if (!range) {
    const text = "Drag on the time axis, or anywhere with Shift, for what is in a stretch of time.";
    place.replaceChildren(element("p", { class: "tl-hint", text }));
    return;
  }
  const [from, to] = range;
  const { byName, byCategory } = rangeSums(slices, from, to);
  const cut = `The ${MOST_ROWS} largest of ${formatCount(byName.length)} names.`;
  const heading = element("h3", { text: formatDuration(to - from) });
  heading.append(element("small", { text: ` from ${formatDuration(from - slices.traceBegin)}` }),
    button("Zoom", () => view.zoomTo(from, to), { class: "tl-small" }),
    button("Clear", () => view.setRange(null), { class: "tl-small" }));
  place.replaceChildren(
    heading,
    element("div", { class: "tl-tables" }, table("Category", byCategory), table("Name", byName.slice(0, MOST_ROWS))),
    element("p", { class: "tl-hint", text: byName.length > MOST_ROWS ? `${cut} ${DEFINITION}` : DEFINITION })
  );
}

/**
 * @param {string} label
 * @param {import("./range_sums.js").Sum[]} sums
 */
function table(label, sums) {
  const head = element("tr", {}, ...[label, "Count", "Time"].map((text) => element("th", { text, scope: "col" })));
  const rows = sums.map((sum) => element("tr", {},
    element("th", { scope: "row", title: sum.label }, element("bdi", { text: sum.label })),
    element("td", { text: formatCount(sum.count) }), element("td", { text: formatDuration(sum.ns) })));
  const parts = [element("thead", {}, head), element("tbody", {}, ...rows)];
  return element("table", { class: `tl-by-${label.toLowerCase()}` }, ...parts);
}
