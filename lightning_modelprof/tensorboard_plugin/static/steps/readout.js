// Details of the point at the cursor.

import { make } from "../dom.js";
import { formatCount, formatDuration, formatRate } from "../format.js";

/** @typedef {import("./data.js").Steps} Steps */
/** @typedef {import("./bins.js").Points} Points */

/** @typedef {{step: string, steps: string, samples: string}} Words of the loop */
/** @typedef {(step: number) => object | null} Goto from a step's number to where its trace is, if it has one */

/**
 * @param {object} trace where it is
 * @param {string} step its name
 */
export function traceLink(trace, step) {
  const goto = JSON.stringify(trace);
  return make("a", { class: "goto", href: "#", "data-goto": goto, "aria-label": `Trace of ${step}` }, "Trace");
}

/**
 * Links and buttons for the selected point: for its step, or the slowest of its steps.
 * @param {Steps} steps
 * @param {Points} points
 * @param {number} point
 * @param {Words} words
 * @param {(step: number) => void} onChoose
 * @param {Goto} goto
 * @returns {(Node | string)[]}
 */
export function pickedStep(steps, points, point, words, onChoose, goto) {
  const step = points.slowest[point] < 0 ? points.start[point] : points.slowest[point];
  const name = `${words.step} ${steps.number[step]}`;
  const trace = goto(steps.number[step]);
  const zoom = make("button", { type: "button", onclick: () => onChoose(step) }, "Zoom in");
  const which = points.end[point] - points.start[point] > 1 ? `Slowest in this bar: ${name} ` : `Selected ${name} `;
  return [which, zoom, " ", trace ? traceLink(trace, name) : "not recorded by a window."];
}

/**
 * One step, or those that a point joins.
 * @param {Steps} steps
 * @param {Points} points
 * @param {number} point
 * @param {Words} words
 */
export function describePoint(steps, points, point, words) {
  const [start, last] = [points.start[point], points.end[point] - 1];
  if (start === last) return describeStep(steps, start, words, points.rate[point]);
  const place = `${words.steps} ${steps.number[start]} to ${steps.number[last]}`;
  if (!points.count[point]) return `${place}: ${reasonsOf(steps, start, last)}; no clean ${words.step}`;
  const slowest = points.slowest[point];
  const parts = [
    `mean ${formatDuration(points.mean[point])} of ${formatCount(points.count[point])} ${words.steps}`,
    `slowest ${steps.number[slowest]} (${formatDuration(points.longest[point])})`,
    rateOf(steps, points.rate[point], words),
    reasonsOf(steps, start, last),
  ];
  return `${place}: ${parts.filter(Boolean).join("; ")}`;
}

/**
 * @param {Steps} steps
 * @param {number} step
 * @param {Words} words
 * @param {number} rate
 */
function describeStep(steps, step, words, rate) {
  const reason = steps.reason(step);
  const other = steps.marks(step).filter((mark) => mark !== reason);
  const rest = steps.layers.find((layer) => layer.key === "rest")?.phases ?? [];
  const others = rest
    .filter((phase) => steps.time(phase, step))
    .map((phase) => `${steps.phases[phase].label} ${formatDuration(steps.time(phase, step))}`);
  const parts = [
    formatDuration(steps.duration[step]),
    rateOf(steps, rate, words),
    others.length ? `other phases: ${others.join(", ")}` : "",
    reason && `not clean (${reason})`,
    other.length ? `also: ${other.join(", ")}` : "",
  ];
  return `${words.step} ${steps.number[step]}: ${parts.filter(Boolean).join("; ")}`;
}

/**
 * @param {Steps} steps
 * @param {number} rate
 * @param {Words} words
 */
function rateOf(steps, rate, words) {
  return Number.isNaN(rate) ? "" : `${formatRate(rate)} ${steps.hasSamples ? words.samples : words.steps}/s`;
}

/**
 * How many steps were excluded, by reason.
 * @param {Steps} steps
 * @param {number} first
 * @param {number} last inclusive
 */
function reasonsOf(steps, first, last) {
  const counts = steps.exclusions.map(() => 0);
  for (let step = first; step <= last; step += 1) counts[steps.exclusion[step]] += 1;
  const found = steps.exclusions
    .map((reason, place) => (place && counts[place] ? `${reason} ${formatCount(counts[place])}` : ""))
    .filter(Boolean);
  return found.length ? `not clean: ${found.join(", ")}` : "";
}
