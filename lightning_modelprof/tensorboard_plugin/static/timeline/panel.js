// What is known of the selected slice and of the selected stretch of time.

import { make } from "../dom.js";
import { formatBegin, formatCount, formatDuration } from "../units.js";
import { rangeSums } from "./range_sums.js";

/** @typedef {import("./timeline_view.js").TimelineView} TimelineView */

const MOST_LINKS = 20;
const MOST_ROWS = 30;
const FINER = 100; // neighbours may be that much shorter, and begin is still another text
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
    const notes = slices.notes.map((text) => make("p", { class: "tl-hint" }, text));
    place.replaceChildren(make("p", { class: "tl-hint" }, "Click a slice for what is known of it."), ...notes);
    return;
  }
  const lane = slices.lanes[slices.rowOf(selected).lane];
  const step = slices.stepAt(slices.begin[selected]);
  const list = make("dl");
  /**
   * @param {string} label
   * @param {...(Node | string)} values
   */
  const add = (label, ...values) => {
    list.append(make("div", {}, make("dt", {}, label), make("dd", {}, ...values)));
  };
  add("Category", slices.categoryOf(selected));
  add("Lane", make("bdi", {}, lane.label));
  add("Begin", formatBegin(slices.begin[selected] - slices.traceBegin, slices.duration[selected] / FINER));
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
    make("h3", {}, make("bdi", {}, slices.nameOf(selected))),
    list,
    ...(detail ? [make("pre", { class: "tl-detail", tabindex: "0" }, detail)] : [])
  );
}

/**
 * @param {TimelineView} view
 * @param {number} index
 */
function link(view, index) {
  const jump = { type: "button", class: "tl-link", dir: "auto", onclick: () => view.jumpTo(index) };
  return make("button", jump, view.slices.nameOf(index));
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
    place.replaceChildren(make("p", { class: "tl-hint" }, text));
    return;
  }
  const [from, to] = range;
  const { byName, byCategory } = rangeSums(slices, from, to);
  const cut = `The ${MOST_ROWS} largest of ${formatCount(byName.length)} names.`;
  const heading = make("h3", {}, formatDuration(to - from));
  heading.append(make("small", {}, ` from ${formatBegin(from - slices.traceBegin, (to - from) / FINER)}`),
    make("button", { type: "button", class: "tl-small", onclick: () => view.zoomTo(from, to) }, "Zoom"),
    make("button", { type: "button", class: "tl-small", onclick: () => view.setRange(null) }, "Clear"));
  place.replaceChildren(
    heading,
    make("div", { class: "tl-tables" }, table("Category", byCategory), table("Name", byName.slice(0, MOST_ROWS))),
    make("p", { class: "tl-hint" }, byName.length > MOST_ROWS ? `${cut} ${DEFINITION}` : DEFINITION)
  );
}

/**
 * @param {string} label
 * @param {import("./range_sums.js").Sum[]} sums
 */
function table(label, sums) {
  const head = make("tr", {}, ...[label, "Count", "Time"].map((text) => make("th", { scope: "col" }, text)));
  const rows = sums.map((sum) => make("tr", {},
    make("th", { scope: "row", title: sum.label }, make("bdi", {}, sum.label)),
    make("td", {}, formatCount(sum.count)), make("td", {}, formatDuration(sum.ns))));
  const parts = [make("thead", {}, head), make("tbody", {}, ...rows)];
  return make("table", { class: `tl-by-${label.toLowerCase()}` }, ...parts);
}
