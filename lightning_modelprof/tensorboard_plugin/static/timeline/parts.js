// The view's elements, empty.

import { make } from "../dom.js";

/** @typedef {ReturnType<typeof makeParts>} Parts */

/** Builds all of them. */
export function makeParts() {
  const search = make("input", {
    type: "search", placeholder: "Search slices", "aria-label": "Search slices by name", spellcheck: "false",
  });
  const count = make("output", { class: "tl-count" });
  const buttons = make("span", { class: "tl-buttons" });
  const message = make("span", { class: "tl-message", role: "status" });
  const find = make("span", { class: "tl-search" }, search, count);
  const bar = make("div", { class: "tl-bar" }, find, buttons, message);
  const legend = make("ul", { class: "tl-legend", "aria-label": "Categories: colors and visibility" });

  const about = make("span", { class: "tl-about" });
  const base = make("span", { class: "tl-base" });
  const head = make("canvas", {
    class: "tl-head-canvas", role: "img", "aria-label": "Overview, time axis and steps",
  });
  const corner = make("div", { class: "tl-corner" }, about, base, make("span", {}, "Steps"));
  const top = make("div", { class: "tl-head" }, corner, head);

  const canvas = make("canvas", {
    class: "tl-canvas", tabindex: "0", role: "application", "aria-roledescription": "timeline",
    "aria-label": "Timeline. Arrow keys move between slices, question mark shows all keyboard shortcuts.",
  });
  const lanes = make("div", { class: "tl-lanes", role: "group", "aria-label": "Lanes" });
  const content = make("div", { class: "tl-content" }, lanes, canvas);
  const scroller = make("div", { class: "tl-scroller" }, content);
  const tooltip = make("div", { class: "tl-tooltip", hidden: true, "aria-hidden": "true" });
  const stage = make("div", { class: "tl-stage" }, top, scroller, tooltip);

  const selection = make("div", { class: "tl-selection" });
  const range = make("div", { class: "tl-range" });
  const panel = make("div", { class: "tl-panel" }, selection, range);
  const notes = make("div", { class: "tl-notes" });
  const live = make("div", { class: "tl-live", "aria-live": "polite" });
  const help = make("dialog", { class: "tl-help", "aria-label": "Keyboard shortcuts" });
  const root = make("div", { class: "tl" }, bar, legend, stage, panel, notes, live, help);
  return { root, bar, legend, search, count, buttons, message, about, base, head, top, canvas, lanes, content, scroller,
    tooltip, stage, selection, range, panel, notes, live, help };
}

/**
 * The labels at the left; those that open or close something are buttons.
 * @param {Parts} parts
 * @param {import("./layout.js").Layout} layout
 * @param {(item: import("./layout.js").Item) => void} onToggle
 */
export function fillLanes({ lanes, content }, layout, onToggle) {
  const focused = [...lanes.children].findIndex((child) => child.contains(document.activeElement));
  lanes.replaceChildren(...layout.items.map((item) => {
    const style = `top: ${item.y}px; height: ${item.height}px`;
    const label = make("span", { class: "tl-name", title: item.label, dir: "auto" }, item.label);
    const value = item.kind === "counter" ? [make("span", { class: "tl-value" })] : [];
    if (!item.canOpen) return make("div", { class: `tl-lane tl-${item.kind}`, style }, label, ...value);
    const toggle = make(
      "button",
      { type: "button", class: "tl-toggle", "aria-expanded": String(item.isOpen), onclick: () => onToggle(item) },
      label,
    );
    return make("div", { class: `tl-lane tl-${item.kind}`, style }, toggle);
  }));
  content.style.height = `${layout.height}px`;
  if (focused >= 0) lanes.children[focused]?.querySelector("button")?.focus({ preventScroll: true });
}
