// Rows that links lead to, and links from rows to timeline slices of the same name.

import { wholeText } from "./cells.js";
import { make } from "./dom.js";

/** @typedef {import("./table.js").SortableTable} SortableTable */
/** @typedef {import("./table.js").Row} Row */

/**
 * Scroll to the first row of this name and mark it, opening everything that hides it.
 * @param {SortableTable[]} tables
 * @param {string} name the whole name; for a module's slice, its path is enough
 * @returns {boolean} whether there is one
 */
export function showRow(tables, name) {
  const all = tables.flatMap((table) => table.data.rows.map(([cell], index) => ({ table, index, name: wholeText(cell) })));
  const found = all.find((one) => one.name === name) ?? all.find((one) => one.name && name.endsWith(`: ${one.name}`));
  if (!found) return false;
  for (const table of tables) table.mark(null);
  found.table.reveal(found.index);
  return true;
}

/** One link for all rows of a table: in the row under the pointer, and moved with the arrow keys. */
export class RowLink {
  /**
   * @param {SortableTable} table with its body in place
   * @param {string[]} without names without slices
   */
  constructor(table, without) {
    this.table = table;
    this.without = new Set(without);
    /** @type {Row | null} */
    this.row = null;
    // Its text is in the styles, so it's not part of the row's name.
    this.link = make("a", { href: "", class: "goto row-goto" });
    table.body?.addEventListener("pointerover", ({ target }) => {
      const element = /** @type {Element} */ (target).closest("tr");
      const row = element && table.rowOf.get(element);
      if (row && row !== this.row && row.group === null) this.stand(row);
    });
    this.link.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const { listed } = table;
      let place = this.row ? listed.indexOf(this.row) + step : 0;
      while (listed[place] && !this.hasSlices(listed[place])) place += step;
      if (!listed[place]) return;
      this.stand(listed[place]);
      this.link.focus();
    });
  }

  /** @param {Row} row */
  hasSlices({ cells, group }) {
    return group === null && !this.without.has(wholeText(cells[0]));
  }

  /** @param {Row} row */
  stand(row) {
    const name = wholeText(row.cells[0]);
    this.row = row;
    this.link.hidden = !this.hasSlices(row);
    this.link.setAttribute("aria-label", `${name} in the trace`);
    this.link.dataset.goto = JSON.stringify({ view: "trace", find: { name } });
    this.table.elementOf(row).cells[0].append(this.link);
  }

  /** If the reader has hidden its row, the keyboard couldn't reach it. */
  settle() {
    if (this.row && this.row.element?.contains(this.link) && this.table.listed.includes(this.row)) return;
    const first = this.table.listed.find((row) => this.hasSlices(row));
    if (first) this.stand(first);
  }
}
