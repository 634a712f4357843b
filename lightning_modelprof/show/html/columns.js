// The menu of a table's columns.

import { make } from "./dom.js";

/** @typedef {import("./table.js").SortableTable} SortableTable */

/**
 * A folded list of all columns, built when it's first opened.
 * @param {SortableTable} table
 */
export function columnMenu(table) {
  const summary = make("summary", {}, "Columns");
  const menu = make("details", { class: "columns" }, summary);
  const outside = (/** @type {Event} */ { target }) => {
    if (!menu.contains(/** @type {Node} */ (target))) menu.open = false;
  };
  summary.addEventListener("click", () => {
    if (menu.children.length === 1) menu.append(columnChoice(table));
  });
  menu.addEventListener("toggle", () => {
    if (menu.open) document.addEventListener("pointerdown", outside);
    else document.removeEventListener("pointerdown", outside);
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    event.stopPropagation();
    menu.open = false;
    summary.focus();
  });
  menu.addEventListener("focusout", ({ relatedTarget }) => {
    if (relatedTarget instanceof Node && !menu.contains(relatedTarget)) menu.open = false;
  });
  return menu;
}

/** @param {SortableTable} table */
function columnChoice(table) {
  const boxes = table.data.headers.slice(1).map(({ key }) => make("input", { type: "checkbox", value: key }));
  const check = () => {
    const keys = table.seenKeys();
    for (const box of boxes) box.checked = keys.includes(box.value);
  };
  /** @param {string[]} keys */
  const choose = (keys) => {
    table.showColumns(keys);
    table.onChange();
    check();
  };
  for (const box of boxes) {
    box.addEventListener("change", () => choose(boxes.filter((one) => one.checked).map((one) => one.value)));
  }
  /** @type {[string, () => string[]][]} */
  const ways = [["All", () => boxes.map((box) => box.value)], ["Default", () => table.keysAtFirst]];
  const buttons = ways.map(([text, which]) => make("button", { type: "button", onclick: () => choose(which()) }, text));
  const labels = boxes.map((box, place) => make("label", {}, box, ` ${table.data.headers[place + 1].full}`));
  check();
  return make("div", {}, make("p", {}, ...buttons), ...labels);
}
