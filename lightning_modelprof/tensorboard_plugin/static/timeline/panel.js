// Details of the selected slice.

import { firstFrom } from "../sorted.js";
import { keepFocus, make } from "../dom.js";
import { formatBegin, formatCount, formatDuration } from "../format.js";
import { detailOf, framesOf, lineOf, lineWithStack } from "./stack.js";

/** @typedef {import("./timeline_view.js").TimelineView} TimelineView */

const HINT = "Click a slice for details.";
const MOST_LINKS = 20;
const FINER = 100; // adjacent slices may be this much shorter and still show different start times

/** @type {Record<string, [string, string]>} category → the view whose tables have its names, and its link's text */
const TABLES = {
  kernel: ["kernels", "In Kernels"], memcpy: ["kernels", "In Kernels"], memset: ["kernels", "In Kernels"],
  "runtime call": ["kernels", "In Kernels"], "user range": ["operators", "In Operators"],
  operator: ["operators", "In Operators"], module: ["modules", "In Modules"],
};
/** How the lines of idle time's details start, and their labels here. */
const OF_IDLE = [["idle: ", "Why"], ["meanwhile on ", "Meanwhile"]];

/**
 * A keyboard focus inside it moves to the canvas, where it's on the selected slice.
 * @param {TimelineView} view
 * @param {HTMLElement} place
 */
export function showSelection(view, place) {
  keepFocus(place, () => {
    place.replaceChildren(...(view.selected < 0 ? [make("p", { class: "tl-hint" }, HINT)] : selectedSlice(view)));
    return view.parts.canvas;
  });
}

/** @param {TimelineView} view */
function selectedSlice(view) {
  const { all, selected } = view;
  const list = make("dl");
  /**
   * @param {string} label
   * @param {...(Node | string)} values
   */
  const add = (label, ...values) => {
    list.append(make("div", {}, make("dt", {}, label), make("dd", {}, ...values)));
  };
  const { lines, frames } = detailOf(all, selected);
  const isIdle = all.isIdle[all.category[selected]];
  if (isIdle) addIdle(view, lines, frames, add);
  addTimes(view, add, isIdle);
  const stack = isIdle ? [] : framesOf(all, selected);
  if (stack.length) add("Line", lineWithStack(lineOf(stack) || stack[0], stack));
  addLaunches(view, add);
  const table = tableOf(view);
  return [
    make("h2", {}, make("bdi", { title: all.nameOf(selected) }, all.nameOf(selected))),
    ...(table ? [table] : []),
    list,
    ...(lines.length && !isIdle ? [make("pre", { class: "tl-detail", tabindex: "0" }, lines.join("\n"))] : []),
  ];
}

/** @typedef {(label: string, ...values: (Node | string)[]) => void} Add */

/**
 * Position and duration.
 * @param {TimelineView} view
 * @param {Add} add
 * @param {boolean} isIdle
 */
function addTimes({ all, selected }, add, isIdle) {
  const step = all.stepOf(selected);
  add("Category", all.categoryOf(selected));
  add("Lane", make("bdi", {}, all.lanes[all.rowOf(selected).lane].label));
  add("Start", formatBegin(all.begin[selected] - all.traceBegin, all.duration[selected] / FINER));
  add("Duration", formatDuration(all.duration[selected]));
  if (!isIdle) add("Self time", formatDuration(all.selfTime(selected)));
  // A batch's detail has the step that used it, which is hardly ever the one in which it was started.
  if (!all.isBatch[all.category[selected]]) add("Step", step ? String(step.number) : "outside steps");
}

/**
 * Why a device was idle, what the CPU did, and what ended it.
 * @param {TimelineView} view
 * @param {string[]} lines
 * @param {string[]} frames
 * @param {Add} add
 */
function addIdle(view, lines, frames, add) {
  for (const text of lines) {
    const known = OF_IDLE.find(([begin]) => text.startsWith(begin));
    if (known) add(known[1], make("span", { class: "tl-wide" }, text.slice(known[0].length)));
  }
  if (frames.length) add("Line", lineWithStack(lineOf(frames) || frames[0], frames));
  const ended = endingOf(view.all, view.selected);
  if (ended >= 0) add("Ended by", link(view, ended));
  const launcher = ended < 0 ? -1 : view.all.launch[ended] ?? -1;
  if (launcher >= 0) add("Launched by", link(view, launcher));
}

/**
 * The work that ends a device's idle time; if there are multiple, the one launched first.
 * @param {import("./slices.js").Slices} slices
 * @param {number} idle
 */
function endingOf(slices, idle) {
  const { begin, launch } = slices;
  const row = slices.rowOf(idle);
  let end = slices.end[idle];
  const goesOn = (/** @type {number} */ at) => slices.isIdle[slices.category[at]] || !slices.duration[at];
  for (let at = idle + 1; at < row.last && begin[at] === end && goesOn(at); at += 1) end = slices.end[at];
  const { group } = slices.lanes[row.lane];
  let best = -1;
  for (const { lane, first, last } of slices.rows) {
    if (slices.lanes[lane].group !== group) continue;
    for (let at = firstFrom(begin, first, last, end); at < last && begin[at] === end; at += 1) {
      if (slices.isIdle[slices.category[at]] || !slices.duration[at] || launch[at] < 0) continue;
      if (best < 0 || begin[launch[at]] < begin[launch[best]]) best = at;
    }
  }
  return best;
}

/**
 * Links to its launch and to the slices that it launched.
 * @param {TimelineView} view
 * @param {Add} add
 */
function addLaunches(view, add) {
  const { all, selected } = view;
  const launcher = all.launch[selected] ?? -1;
  if (launcher >= 0 && all.isPath[all.category[selected]]) {
    add("Part of", link(view, launcher));
  } else if (launcher >= 0 && all.isBatch[all.category[launcher]]) {
    add("Batch used", link(view, launcher));
    add("Ready to end", formatDuration(all.end[selected] - all.end[launcher]));
  } else if (launcher >= 0) {
    add("Launched by", link(view, launcher));
    add("Launch to start", formatDuration(all.begin[selected] - all.begin[launcher]));
  }
  const launches = all.launchesOf(selected);
  if (!launches.length) return;
  const more = launches.length - MOST_LINKS;
  add(all.isBatch[all.category[selected]] ? "Used after" : "Launches", ...launches.slice(0, MOST_LINKS).map((index) => link(view, index)),
    more > 0 ? `and ${formatCount(more)} more` : "");
}

/**
 * A link to a slice's row in the tables, which the dashboard follows.
 * @param {TimelineView} view
 */
function tableOf({ all, selected }) {
  const kind = all.categoryOf(selected);
  const isKernel = kind === "communication" && all.lanes[all.rowOf(selected).lane].isDevice;
  const table = TABLES[isKernel ? "kernel" : kind];
  if (!Object.hasOwn(TABLES, isKernel ? "kernel" : kind)) return undefined;
  const [view, text] = table;
  const goto = JSON.stringify({ view, row: { name: all.nameOf(selected) } });
  return make("a", { href: "", class: "goto", "data-goto": goto }, text);
}

/**
 * @param {TimelineView} view
 * @param {number} index
 */
function link(view, index) {
  const jump = { type: "button", class: "tl-link", dir: "auto", onclick: () => view.jumpTo(index) };
  return make("button", jump, view.all.nameOf(index));
}

/**
 * The description for screen readers.
 * @param {TimelineView} view
 */
export function spoken({ all, selected }) {
  if (selected < 0) return "Nothing selected.";
  const step = all.stepOf(selected);
  return [
    all.nameOf(selected), all.categoryOf(selected), formatDuration(all.duration[selected]),
    all.lanes[all.rowOf(selected).lane].label, ...(step ? [`step ${step.number}`] : []),
  ].join(", ");
}
