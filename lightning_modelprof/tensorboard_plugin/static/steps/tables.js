// Tables of a range: its slowest steps, and where slow steps spend their time.

import { DASH, formatDuration, formatRate, formatRatio } from "../format.js";
import { make } from "../dom.js";
import { traceLink } from "./readout.js";

/** @typedef {import("./data.js").Steps} Steps */
/** @typedef {import("./readout.js").Words} Words */

/**
 * @param {string[]} names column names; the first is the heading of the rows' names
 * @param {string[]} textColumns names of columns without numbers
 * @param {Node[]} rows
 */
function table(names, textColumns, rows) {
  const heads = names.map((name, place) =>
    make("th", { scope: "col", ...(place && !textColumns.includes(name) ? { class: "n" } : {}) }, name),
  );
  const head = make("thead", {}, make("tr", {}, ...heads));
  return make("div", { class: "scroll", tabindex: "0" }, make("table", {}, head, make("tbody", {}, ...rows)));
}

/**
 * @param {string} text
 */
function numberCell(text) {
  return make("td", { class: text === DASH ? "n none" : "n" }, text);
}

/**
 * The slowest steps with their phases.
 * @param {Steps} steps
 * @param {number[]} slowest
 * @param {number | null} median time of a clean step in the range, in ns
 * @param {Words} words
 * @param {(step: number) => void} onChoose
 * @param {import("./readout.js").Goto} goto
 */
export function slowestTable(steps, slowest, median, words, onChoose, goto) {
  const totals = steps.phases.map((_, phase) => slowest.reduce((sum, step) => sum + (steps.time(phase, step) ?? 0), 0));
  const shown = totals.map((_, phase) => phase).filter((phase) => totals[phase]);
  shown.sort((a, b) => totals[b] - totals[a]); // the cause of their slowness is first
  const traces = slowest.map((step) => goto(steps.number[step]));
  const hasTraces = traces.some((trace) => trace);
  const rows = slowest.map((step, place) => {
    const trace = traces[place];
    const button = make("button", { type: "button", class: "link" }, String(steps.number[step]));
    const row = make(
      "tr",
      { class: "steps-row" },
      make("th", { scope: "row" }, button),
      numberCell(formatDuration(steps.duration[step])),
      numberCell(median ? `${formatRate(steps.duration[step] / median)}×` : DASH),
      make("td", {}, steps.reason(step)),
      ...(hasTraces ? [make("td", {}, ...(trace ? [traceLink(trace, `${words.step} ${steps.number[step]}`)] : []))] : []),
      ...shown.map((phase) => numberCell(steps.time(phase, step) === 0 ? "0" : formatDuration(steps.time(phase, step)))),
    );
    // A press of the button is a click on its row; a link leads elsewhere.
    row.addEventListener("click", ({ target }) => target instanceof Element && !target.closest("a") && onChoose(step));
    return row;
  });
  const texts = hasTraces ? [LEFT_OUT, "recorded"] : [LEFT_OUT];
  const names = [words.step, "time", "× median", ...texts, ...shown.map((phase) => steps.phases[phase].label)];
  return table(names, texts, rows);
}

const LEFT_OUT = "reason excluded";

/**
 * Causes of slow steps.
 * @param {{step: import("./statistics.js").Cause, phases: import("./statistics.js").Cause[]}} causes
 * @param {Words} words
 */
export function causesTable({ step, phases }, words) {
  const rows = [...phases, { ...step, label: `Whole ${words.step}` }].map(({ label, slow, others, more }) => {
    const share = more === null || !step.more ? null : more / step.more;
    const times = [slow, others, more].map(formatDuration);
    if (more !== null && more > 0) times[2] = `+${times[2]}`;
    return make("tr", {}, make("th", { scope: "row" }, label), ...[...times, formatRatio(share)].map(numberCell));
  });
  rows[rows.length - 1].className = "steps-sum";
  return table(["phase", "slow", "others", "difference", "share of difference"], [], rows);
}
