// Rows that links lead to, and links from rows to the slices of the timeline that have their names.

import { wholeText } from "./copying.js";
import { tableOf } from "./tables.js";

/**
 * Scroll to the first row of this name, and mark it; what hides it is opened.
 * @param {ParentNode} root where the tables are
 * @param {string} name all of it; of a slice that is a module's, its path is enough
 * @returns {boolean} whether there is one
 */
export function showRow(root, name) {
  /** @type {NodeListOf<HTMLTableRowElement>} */
  const rows = root.querySelectorAll(".table tbody tr:not(.group)");
  const all = Array.from(rows, (row) => ({ row, name: wholeText(row.cells[0]) }));
  const found = all.find((one) => one.name === name) ?? all.find((one) => one.name && name.endsWith(`: ${one.name}`));
  if (!found) return false;
  const { row } = found;
  for (const one of root.querySelectorAll("tr[aria-current]")) one.removeAttribute("aria-current");
  for (let above = row.parentElement; above; above = above.parentElement) {
    if (above instanceof HTMLDetailsElement) above.open = true;
  }
  tableOf(row)?.reveal(row);
  row.setAttribute("aria-current", "true");
  row.scrollIntoView({ block: "center", inline: "nearest" });
  return true;
}

/**
 * One link for all rows of a table: it stands in the row that is pointed at, and goes on with the arrow keys.
 * @param {HTMLTableElement} table
 */
export function connectRowLinks(table) {
  const { noSlices } = table.dataset;
  if (noSlices === undefined) return;
  /** @type {string[]} */
  const without = JSON.parse(noSlices);
  const body = table.tBodies[0];
  const link = document.createElement("a");
  link.href = "";
  link.className = "goto row-goto"; // its text is in the styles, since texts of cells are copied and searched
  /** @param {HTMLTableRowElement | null | undefined} row */
  const isFree = (row) => Boolean(row && !row.hidden && !row.classList.contains("group"));
  /** @param {HTMLTableRowElement} row */
  const stand = (row) => {
    const name = wholeText(row.cells[0]);
    link.hidden = without.includes(name);
    link.setAttribute("aria-label", `${name} in the trace`);
    link.dataset.goto = JSON.stringify({ view: "trace", find: { name } });
    row.cells[0].append(link);
  };
  body.addEventListener("pointerover", (event) => {
    const row = /** @type {Element} */ (event.target).closest("tr");
    if (row !== link.closest("tr") && isFree(row)) stand(/** @type {HTMLTableRowElement} */ (row));
  });
  link.addEventListener("keydown", (event) => {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (!step) return;
    event.preventDefault();
    /** @param {Element | null | undefined} row */
    const next = (row) => /** @type {any} */ (row)?.[step];
    let row = next(link.closest("tr"));
    while (row && (!isFree(row) || without.includes(wholeText(row.cells[0])))) row = next(row);
    if (!row) return;
    stand(row);
    link.focus();
  });
  // Where the reader has hidden its row, the keyboard would not reach it.
  const settle = () => {
    if (isFree(link.closest("tr"))) return;
    const first = Array.from(body.rows).find((row) => isFree(row) && !without.includes(wholeText(row.cells[0])));
    if (first) stand(first);
  };
  settle();
  for (const change of ["input", "change", "click"]) table.closest(".table")?.addEventListener(change, settle);
}
