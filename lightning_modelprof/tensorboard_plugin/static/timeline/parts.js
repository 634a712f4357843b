// The elements of the view, empty.

import { button, element } from "./dom.js";

/** @typedef {ReturnType<typeof makeParts>} Parts */

/** Makes all of them. */
export function makeParts() {
  const search = element("input", {
    type: "search", placeholder: "Search slices", "aria-label": "Search slices by name", spellcheck: "false",
  });
  const count = element("output", { class: "tl-count" });
  const buttons = element("span", { class: "tl-buttons" });
  const message = element("span", { class: "tl-message", role: "status" });
  const find = element("span", { class: "tl-search" }, search, count);
  const bar = element("div", { class: "tl-bar" }, find, buttons, message);
  const legend = element("ul", { class: "tl-legend", "aria-label": "Colours of the categories" });

  const about = element("span", { class: "tl-about" });
  const base = element("span", { class: "tl-base" });
  const head = element("canvas", {
    class: "tl-head-canvas", role: "img", "aria-label": "The whole trace, the time axis and the steps",
  });
  const corner = element("div", { class: "tl-corner" }, about, base, element("span", { text: "Steps" }));
  const top = element("div", { class: "tl-head" }, corner, head);

  const canvas = element("canvas", {
    class: "tl-canvas", tabindex: "0", role: "application", "aria-roledescription": "timeline",
    "aria-label": "Timeline. Arrow keys move from slice to slice, question mark shows all keys.",
  });
  const lanes = element("div", { class: "tl-lanes", role: "group", "aria-label": "Lanes" });
  const content = element("div", { class: "tl-content" }, lanes, canvas);
  const scroller = element("div", { class: "tl-scroller" }, content);
  const tooltip = element("div", { class: "tl-tooltip", hidden: true, "aria-hidden": "true" });
  const stage = element("div", { class: "tl-stage" }, top, scroller, tooltip);

  const selection = element("div", { class: "tl-selection" });
  const range = element("div", { class: "tl-range" });
  const panel = element("div", { class: "tl-panel" }, selection, range);
  const live = element("div", { class: "tl-live", "aria-live": "polite" });
  const help = element("dialog", { class: "tl-help", "aria-label": "Keys" });
  const root = element("div", { class: "tl" }, bar, legend, stage, panel, live, help);
  return { root, bar, legend, search, count, buttons, message, about, base, head, top, canvas, lanes, content, scroller,
    tooltip, stage, selection, range, panel, live, help };
}

/**
 * What the colours mean; names differ in shade.
 * @param {Parts} parts
 * @param {string[]} categories
 * @param {number[]} bases of each category which --c of the page
 */
export function fillLegend({ legend }, categories, bases) {
  /** @type {Map<number, string[]>} categories of one colour stand together */
  const byColor = new Map();
  categories.forEach((category, place) => {
    byColor.set(bases[place], [...(byColor.get(bases[place]) ?? []), category]);
  });
  legend.replaceChildren(...Array.from(byColor, ([base, names]) => {
    const swatch = element("i", { style: `background: var(--c${base})` });
    return element("li", {}, swatch, element("bdi", { text: names.join(", ") }));
  }));
}

/**
 * The labels at the left, each a button where there is something to open or close.
 * @param {Parts} parts
 * @param {import("./layout.js").Layout} layout
 * @param {(item: import("./layout.js").Item) => void} onToggle
 */
export function fillLanes({ lanes, content }, layout, onToggle) {
  const focused = [...lanes.children].findIndex((child) => child.contains(document.activeElement));
  lanes.replaceChildren(...layout.items.map((item) => {
    const style = `top: ${item.y}px; height: ${item.height}px`;
    const label = element("span", { class: "tl-name", text: item.label, title: item.label, dir: "auto" });
    const value = item.kind === "counter" ? [element("span", { class: "tl-value" })] : [];
    if (!item.canOpen) return element("div", { class: `tl-lane tl-${item.kind}`, style }, label, ...value);
    const toggle = button("", () => onToggle(item), { class: "tl-toggle", "aria-expanded": String(item.isOpen) });
    toggle.append(label);
    return element("div", { class: `tl-lane tl-${item.kind}`, style }, toggle);
  }));
  content.style.height = `${layout.height}px`;
  if (focused >= 0) lanes.children[focused]?.querySelector("button")?.focus({ preventScroll: true });
}
