// Charts. The legend shows the values of the point under the pointer, or selected with the arrow keys.

import { heading, make } from "./dom.js";

/** @typedef {{at: number, label: string}} Tick a label on an axis, at a percentage of its length */

/**
 * @typedef {Object} ChartData
 * @property {string} id
 * @property {string} title
 * @property {string} about
 * @property {"bar" | "area" | "line"} form
 * @property {string} y_label
 * @property {string} x_label
 * @property {{label: string, color: string, path: string, value: string, percent: number | null}[]} layers lowest first
 * @property {Tick[]} x_ticks
 * @property {Tick[]} y_ticks
 * @property {string[]} notes
 * @property {{points: string[], values: string[][], totals: string[]}} hover
 * @property {Tick | null} level
 */

const SVG = "http://www.w3.org/2000/svg";

/**
 * @param {ChartData} data
 * @returns {HTMLElement}
 */
export function drawChart(data) {
  const unit = data.y_label ? [" ", make("span", { class: "unit" }, data.y_label)] : [];
  return make(
    "figure",
    { class: "chart", id: `chart-${data.id}`, "data-chart": data.id },
    make("figcaption", {}, heading(data.title, data.about), ...unit),
    ...(data.form === "bar" ? shareBar(data) : plot(data)),
    ...data.notes.map((note) => make("p", { class: "note" }, note)),
  );
}

/**
 * One bar, with all numbers in its legend.
 * @param {ChartData} data
 */
function shareBar({ layers }) {
  const label = layers.map((layer) => `${layer.label} ${layer.value}`).join(", ");
  const parts = layers.flatMap((layer) => {
    if (!layer.percent) return [];
    const style = `width:${layer.percent.toFixed(4)}%`;
    return [make("span", { class: layer.color, style, title: `${layer.label} ${layer.value}` })];
  });
  const items = layers.map((layer) =>
    make("li", {}, make("i", { class: layer.color }), `${layer.label} `, make("b", {}, layer.value)),
  );
  return [make("div", { class: "share", role: "img", "aria-label": label }, ...parts), make("ul", { class: "legend" }, ...items)];
}

/** @param {ChartData} data */
function plot(data) {
  const { form, hover, layers, level, title, x_label: xLabel, x_ticks: xTicks, y_ticks: yTicks } = data;
  const svg = document.createElementNS(SVG, "svg");
  for (const [name, value] of [["viewBox", "0 0 1000 1000"], ["preserveAspectRatio", "none"], ["aria-hidden", "true"]]) {
    svg.setAttribute(name, value);
  }
  for (const { color, path } of layers) {
    const shape = document.createElementNS(SVG, "path");
    shape.setAttribute("class", `${color} ${form}`);
    shape.setAttribute("d", path);
    svg.append(shape);
  }
  /** @type {(side: string, tick: Tick) => string} */
  const at = (side, tick) => `${side}:${tick.at.toFixed(3)}%`;
  const cursor = make("div", { class: "cursor", hidden: true });
  const label = `${title} by ${xLabel}. Arrow keys show the values of each point below.`;
  const field = make(
    "div",
    { class: "field", tabindex: "0", role: "img", "aria-label": label },
    ...yTicks.map((tick) => make("hr", { style: at("bottom", tick) })),
    svg,
    ...(level ? [make("div", { class: "level", style: at("bottom", level) }, make("span", {}, level.label))] : []),
    cursor,
  );
  const ys = yTicks.map((tick) => make("span", { style: at("bottom", tick) }, tick.label));
  const xs = xTicks.map((tick) => make("span", { style: at("left", tick) }, tick.label));
  const point = make("li", { class: "point" });
  const values = layers.map(() => make("b"));
  const items = layers.map((layer, place) => {
    const mark = make("i", { class: `${layer.color}${form === "line" ? " line" : ""}` });
    return make("li", { class: layers.length === 1 && "only" }, mark, `${layer.label} `, values[place]);
  });
  if (form !== "line") items.reverse(); // the legend starts with the top of the stack
  const total = make("b");
  const sum = hover.totals.length && layers.length > 1 ? [make("li", { class: "total" }, "Total ", total)] : [];
  followPoints(field, cursor, hover.points.length, (index) => {
    point.textContent = index === null ? "" : hover.points[index];
    values.forEach((value, layer) => {
      value.textContent = index === null ? "" : hover.values[layer][index];
    });
    total.textContent = index === null ? "" : hover.totals[index] ?? "";
  });
  return [
    make(
      "div",
      { class: "plot" },
      make("div", { class: "ys", "aria-hidden": "true" }, ...ys),
      field,
      make("div", { class: "xs", "aria-hidden": "true" }, ...xs),
      make("div", { class: "x-label", "aria-hidden": "true" }, xLabel),
    ),
    make("ul", { class: "legend", "aria-live": "polite" }, point, ...items, ...sum),
  ];
}

/**
 * The cursor is at the point under the pointer, or selected with the keyboard.
 * @param {HTMLElement} field
 * @param {HTMLElement} cursor
 * @param {number} count of points
 * @param {(index: number | null) => void} tell
 */
export function followPoints(field, cursor, count, tell) {
  /** @type {number | null} */
  let place = null;
  /** @param {number | null} index */
  const go = (index) => {
    place = index === null ? null : Math.max(0, Math.min(count - 1, index));
    cursor.hidden = place === null;
    cursor.style.left = `${(100 * (place ?? 0)) / count}%`;
    cursor.style.width = `${100 / count}%`;
    tell(place);
  };
  field.addEventListener("pointermove", (event) => {
    const box = field.getBoundingClientRect();
    go(Math.floor((count * (event.clientX - box.left)) / box.width));
  });
  field.addEventListener("pointerleave", () => go(null));
  field.addEventListener("blur", () => go(null));
  field.addEventListener("keydown", (event) => {
    /** @type {Record<string, number>} */
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    go((place ?? (moves[event.key] > 0 ? -1 : count)) + moves[event.key]);
  });
}
