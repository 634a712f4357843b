// Contents of the selected time range: first how busy the devices are, then what runs.

import { keepFocus, make } from "../dom.js";
import { formatBegin, formatCount, formatDuration, formatRatio } from "../format.js";
import { deviceTimes, rangeSums } from "./range_sums.js";

/** @typedef {import("./timeline_view.js").TimelineView} TimelineView */

const MOST_ROWS = 30;
const FINER = 100; // adjacent slices may be this much shorter and still show different start times
const DEFINITION =
  "Slice durations, clipped to the range and added up. Nested and parallel slices count more than once.";
const HINT = "Drag the time axis (or Shift+drag) to summarize a range.";
const BUSY = "Busy is time with work on any stream of the device. Idle is the rest, by cause.";

/**
 * A keyboard focus inside it that loses its element moves to the canvas.
 * @param {TimelineView} view
 * @param {HTMLElement} place
 */
export function showRange(view, place) {
  const { range } = view;
  keepFocus(place, () => {
    place.replaceChildren(...(range ? selectedRange(view, range) : [make("p", { class: "tl-hint" }, HINT)]));
    return view.parts.canvas;
  });
}

/**
 * @param {TimelineView} view
 * @param {[number, number]} range
 */
function selectedRange(view, [from, to]) {
  const { all } = view;
  const { byName, byCategory } = rangeSums(all, from, to);
  const cut = `The ${MOST_ROWS} largest of ${formatCount(byName.length)} names.`;
  const heading = make("h2", {}, formatDuration(to - from));
  heading.append(make("small", {}, ` from ${formatBegin(from - all.traceBegin, (to - from) / FINER)}`),
    make("button", { type: "button", class: "tl-small", "data-key": "zoom", onclick: () => view.zoomTo(from, to) }, "Zoom"),
    make("button", { type: "button", class: "tl-small", "data-key": "clear", onclick: () => view.setRange(null) }, "Clear"));
  const devices = deviceTimes(all, from, to);
  return [
    heading,
    ...(devices.length ? [deviceTable(devices), make("p", { class: "tl-hint" }, BUSY)] : []),
    make("div", { class: "tl-tables" }, table("Category", byCategory), table("Name", byName.slice(0, MOST_ROWS))),
    make("p", { class: "tl-hint" }, byName.length > MOST_ROWS ? `${cut} ${DEFINITION}` : DEFINITION),
  ];
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

/**
 * Busy and idle time per device, and the causes of idle time.
 * @param {import("./range_sums.js").DeviceTime[]} devices
 */
function deviceTable(devices) {
  const head = make("tr", {}, ...["Device", "Time", "Share"].map((text) => make("th", { scope: "col" }, text)));
  /** @type {(label: string, ns: number, whole: number, kind: string) => HTMLElement} */
  const row = (label, ns, whole, kind) => make("tr", { class: kind },
    make("th", { scope: "row", title: label }, make("bdi", {}, label)),
    make("td", {}, formatDuration(ns)), make("td", {}, formatRatio(whole ? ns / whole : null)));
  const rows = devices.flatMap(({ group, busy, idle, causes }) => [
    row(`${group} busy`, busy, busy + idle, "tl-busy"),
    row(`${group} idle`, idle, busy + idle, "tl-idle"),
    ...causes.map(({ label, ns }) => row(label, ns, busy + idle, "tl-cause")),
  ]);
  return make("div", { class: "tl-tables" },
    make("table", { class: "tl-by-device" }, make("thead", {}, head), make("tbody", {}, ...rows)));
}
