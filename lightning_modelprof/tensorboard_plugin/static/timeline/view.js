// The timeline of a trace; its contents are in timeline.css and the modules next to this one.

import { TimelineView } from "./timeline_view.js";
import { mergeRanks } from "./ranks.js";
import { make } from "../dom.js";

/** @typedef {import("./timeline_view.js").State} State times in nanoseconds on the columns' clock */
/** @typedef {{destroy: () => void, select: (place: number) => void, zoomTo: (begin: number, end: number) => void, state: () => State, look: () => import("./timeline_view.js").Look}} Mounted */

/**
 * Show a timeline.
 * @param {HTMLElement} container
 * @param {import("../columns.js").Unpacked} unpacked from `unpackColumns` of a timeline's columns
 * @param {import("./timeline_view.js").Options} options `onChange` is called a moment after a change of the state
 * @returns {Mounted}
 */
export function mountTimeline(container, unpacked, options = {}) {
  if (!unpacked.columns.get("begin")?.length) return mountEmpty(container);
  const view = new TimelineView(container, unpacked, options);
  return {
    destroy: () => view.destroy(),
    select: (place) => (place >= 0 ? view.jumpTo(place) : view.select(-1)),
    zoomTo: (begin, end) => view.zoomTo(begin, end),
    state: () => view.state(),
    look: () => view.look(),
  };
}

/**
 * Show the timelines of multiple ranks on one time axis.
 * @param {HTMLElement} container
 * @param {{rank: number | null, unpacked: import("../columns.js").Unpacked}[]} ranks
 * @param {import("./timeline_view.js").Options} options
 */
export function mountRanks(container, ranks, options) {
  return mountTimeline(container, mergeRanks(ranks), options);
}

/**
 * @param {HTMLElement} container
 * @returns {Mounted}
 */
function mountEmpty(container) {
  const note = make("p", { class: "tl-empty" }, "This trace has no slices.");
  container.append(note);
  return {
    destroy: () => note.remove(),
    select: () => {},
    zoomTo: () => {},
    state: () => ({
      begin: 0, end: 0, selected: -1, search: "", range: null, folded: [], hidden: [], found: null,
    }),
    look: () => ({}),
  };
}
