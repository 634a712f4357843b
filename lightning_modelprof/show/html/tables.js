// Tables that sort, search, fold and put rows together. Nothing is computed or rounded here: every text and
// every sum was written by the report.

import { ColumnMenu } from "./columns.js";

/**
 * @typedef {Object} Row
 * @property {HTMLTableRowElement} element
 * @property {number} index its place as it came
 * @property {HTMLElement | null} twist the button that folds the rows below it
 * @property {boolean} isOpen
 * @property {Row[]} below
 * @property {string | null} text what is searched; null until it is needed
 * @property {string | null} group name of the rows below, if it is the heading of a group
 */

/**
 * @typedef {Object} Grouping
 * @property {string} label
 * @property {number[]} members the number of each row's group
 * @property {{name: string, rows: string, sums: (Sum | null)[]}[]} groups
 */

/** @typedef {{text: string, value: number | null, bar: number | null, about: string}} Sum */

/** @typedef {{column: number, isNumber: boolean, sign: number}} Order */

/**
 * How a reader looks at a table; it may come from an address, where anything can stand.
 * @typedef {{sort?: string[], search?: string, group?: string, columns?: string[], all?: boolean}} TableLook
 */

/** @typedef {{row: Row, key: string | number | null}} Keyed */

/** @type {WeakMap<HTMLTableElement, SortableTable>} */
const sortable = new WeakMap();

/**
 * What sorts and folds the table that an element is in.
 * @param {Element} element
 */
export function tableOf(element) {
  const table = element.closest("table");
  return table ? sortable.get(table) : undefined;
}

// A row is shown when its ancestors are open and it is among the first of its siblings, or, while there is a
// search, when it or a row below it has every word. The headings of groups are rows above those of the group.
export class SortableTable {
  /**
   * @param {HTMLTableElement} table
   * @param {TableLook} look as the reader has left it
   * @param {(look: TableLook) => void} onChange what the reader has changed, without what is as at first
   */
  constructor(table, look = {}, onChange = () => {}) {
    this.onChange = () => onChange(this.look());
    this.table = table;
    sortable.set(table, this);
    this.body = table.tBodies[0];
    this.limit = Number(table.dataset.limit);
    /** @type {string[]} */
    this.words = [];
    /** @type {Order | null} */
    this.order = null;
    /** @type {Row[]} */
    this.roots = [];
    /** @type {Row[]} */
    this.headings = [];
    /** @type {Row[]} */
    const above = [];
    this.rows = Array.from(this.body.rows, (element, index) => {
      const depth = Number(element.dataset.depth || 0);
      const row = this.rowOf(element, index);
      above.length = Math.min(above.length, depth);
      (above.length ? above[above.length - 1].below : this.roots).push(row);
      while (above.length < depth) above.push(row); // a level that is left out
      above.push(row);
      return row;
    });
    const head = /** @type {HTMLTableSectionElement} */ (table.tHead);
    this.headers = Array.from(head.rows[head.rows.length - 1].cells);
    this.headers.forEach((header, column) => {
      header.querySelector("button")?.addEventListener("click", () => this.sort(column));
    });
    this.sortedFirst = this.headers.find((header) => header.hasAttribute("aria-sort"));
    this.section = /** @type {HTMLElement} */ (table.closest(".table"));
    this.data = this.section.querySelector("script.groupings");
    this.columns = new ColumnMenu(table, this.section.querySelector("details.columns"), this.onChange);
    this.connect(/** @type {HTMLElement} */ (this.section.querySelector(".tools")));
    this.restore(look);
  }

  /**
   * @param {HTMLTableRowElement} element
   * @param {number} index
   * @param {string | null} group
   * @returns {Row}
   */
  rowOf(element, index, group = null) {
    /** @type {HTMLElement | null} */
    const twist = element.querySelector(".twist");
    const isOpen = twist === null || twist.getAttribute("aria-expanded") === "true";
    /** @type {Row} */
    const row = { element, index, twist, isOpen, below: [], text: null, group };
    twist?.addEventListener("click", () => {
      row.isOpen = !row.isOpen;
      this.show();
    });
    return row;
  }

  /** @param {HTMLElement} tools */
  connect(tools) {
    const search = tools.querySelector("input");
    this.count = search && tools.querySelector("output");
    this.searched = search;
    search?.addEventListener("input", () => {
      this.search(search.value);
      this.onChange();
    });
    /** @type {NodeListOf<HTMLElement>} */
    this.folding = tools.querySelectorAll("[data-do=open], [data-do=close]");
    this.choice = tools.querySelector("select");
    this.choice?.addEventListener("change", () => {
      this.regroup();
      this.onChange();
    });
    /** @type {(name: string, act: () => void) => void} */
    const on = (name, act) => {
      tools.querySelector(`[data-do=${name}]`)?.addEventListener("click", () => {
        act();
        this.show();
      });
    };
    on("open", () => this.openAll(true));
    on("close", () => this.openAll(false));
    on("all", () => {
      this.showAll();
      this.onChange();
    });
    if (this.count) this.show();
  }

  /**
   * Show a row, whatever hides it now.
   * @param {HTMLTableRowElement} element
   */
  reveal(element) {
    /** @type {(siblings: Row[]) => boolean} */
    const open = (siblings) =>
      siblings.some((row, rank) => {
        if (row.element !== element && !open(row.below)) return false;
        if (row.element !== element) row.isOpen = true;
        if (rank >= this.limit && row.group === null) this.showAll();
        return true;
      });
    open(this.roots);
    if (element.hidden && this.words.length) this.search("");
    this.show();
  }

  showAll() {
    this.limit = Infinity;
    const button = this.section.querySelector(".tools [data-do=all]");
    if (button && button === document.activeElement) {
      /** @type {HTMLElement | null} */
      const rows = this.section.querySelector(".scroll");
      rows?.focus({ preventScroll: true });
    }
    button?.remove();
  }

  /** @param {string} text */
  search(text) {
    if (this.searched && this.searched.value !== text) this.searched.value = text;
    this.words = text.toLowerCase().split(/\s+/).filter(Boolean);
    this.show();
  }

  /** @param {boolean} isOpen */
  openAll(isOpen) {
    for (const row of [...this.rows, ...this.headings]) row.isOpen = isOpen;
  }

  /** @param {Row} row */
  matches(row) {
    if (row.text === null) {
      /** @type {NodeListOf<HTMLElement>} */
      const titled = row.element.querySelectorAll("span[title]");
      const texts = Array.from(row.element.querySelectorAll("th, td:not(.n)"), (cell) => cell.textContent);
      row.text = [...texts, ...Array.from(titled, (name) => name.title)].join(" ").toLowerCase(); // no numbers
    }
    const { text } = row;
    return this.words.every((word) => text.includes(word));
  }

  show() {
    const isSearch = this.words.length > 0;
    let found = 0;
    /** @type {(siblings: Row[], isVisible: boolean) => boolean} */
    const visit = (siblings, isVisible) => {
      let anyFound = false;
      siblings.forEach((row, rank) => {
        const isHeading = row.group !== null;
        const isFound = isSearch && !isHeading && this.matches(row);
        const isShown = !isSearch && isVisible && (isHeading || rank < this.limit);
        const isAnyBelow = visit(row.below, isShown && row.isOpen);
        const isListed = isSearch ? isFound || isAnyBelow : isShown;
        if (!isHeading && (isSearch ? isFound : isShown)) found += 1;
        if (row.element.hidden === isListed) row.element.hidden = !isListed;
        row.element.classList.toggle("filtered", isSearch && !isListed);
        row.twist?.setAttribute("aria-expanded", String(isSearch ? isAnyBelow : row.isOpen));
        anyFound ||= isFound || isAnyBelow;
      });
      return anyFound;
    };
    visit(this.roots, true);
    if (this.count) {
      const [seen, total, groups] = [found, this.rows.length, this.headings.length].map((n) => n.toLocaleString("en"));
      this.count.textContent = `${this.headings.length ? `${groups} groups, ` : ""}${seen} of ${total} rows`;
    }
  }

  /** @returns {TableLook} */
  look() {
    const { order } = this;
    const columns = this.columns.look();
    const chosen = this.choice?.value ? this.choice.selectedOptions[0].text : "";
    const direction = order && order.sign < 0 ? "descending" : "ascending";
    return {
      ...(order && { sort: [this.headers[order.column].dataset.key ?? "", direction] }),
      ...(this.words.length && { search: this.searched?.value }),
      ...(chosen && { group: chosen }),
      ...(columns && { columns }),
      ...(this.limit === Infinity && { all: true }),
    };
  }

  /** @param {TableLook} look */
  restore({ sort, search, group, columns, all }) {
    if (all === true) this.showAll();
    if (Array.isArray(columns)) this.columns.show(columns);
    const [key, direction] = Array.isArray(sort) ? sort : [];
    const column = this.headers.findIndex(({ dataset }) => key && dataset.key === key);
    if (column >= 0 && this.headers[column].querySelector("button")) this.setOrder(column, direction);
    const option = Array.from(this.choice?.options ?? []).find(({ value, text }) => value && text === group);
    if (option) option.selected = true;
    if (option) this.regroup();
    else if (this.order) this.arrange();
    if (typeof search === "string" && this.searched) this.search(search);
    else if (all === true) this.show();
  }

  regroup() {
    const value = this.choice?.value ?? "";
    this.group(value === "" ? null : Number(value));
  }

  /**
   * First the largest (of names the first), then the other way round, then as it came. What was not measured
   * stays last. In a tree the rows below one row are sorted among themselves.
   * @param {number} column
   */
  sort(column) {
    const header = this.headers[column];
    const cycle = header.classList.contains("n") ? ["descending", "ascending"] : ["ascending", "descending"];
    const direction = cycle[cycle.indexOf(header.getAttribute("aria-sort") ?? "") + 1];
    this.setOrder(column, direction);
    this.arrange();
    this.onChange();
  }

  /**
   * @param {number} column
   * @param {string | undefined} direction undefined is as it came
   */
  setOrder(column, direction) {
    const header = this.headers[column];
    for (const other of this.headers) other.removeAttribute("aria-sort");
    if (direction) header.setAttribute("aria-sort", direction === "descending" ? direction : "ascending");
    else this.sortedFirst?.setAttribute("aria-sort", "descending");
    const isNumber = header.classList.contains("n");
    this.order = direction ? { column, isNumber, sign: direction === "descending" ? -1 : 1 } : null;
  }

  // Groups are sorted by their sums; by their first row where a column has none, and by name in that of names.
  arrange() {
    const { order } = this;
    /** @type {(a: Keyed, b: Keyed) => number} */
    const compare = (a, b) => {
      if (order === null || a.key === b.key) return a.row.index - b.row.index;
      if (a.key === null || b.key === null) return a.key === null ? 1 : -1;
      if (typeof a.key === "number" && typeof b.key === "number") return order.sign * (a.key - b.key);
      return order.sign * String(a.key).localeCompare(String(b.key), "en", { numeric: true });
    };
    /** @type {(siblings: Row[]) => void} */
    const arrangeAll = (siblings) => {
      for (const row of siblings) arrangeAll(row.below);
      const keyed = siblings.map((row) => ({ row, key: order && keyOf(row, order) })).sort(compare);
      keyed.forEach(({ row }, place) => {
        siblings[place] = row;
      });
    };
    arrangeAll(this.roots);
    const sorted = document.createDocumentFragment();
    /** @type {(siblings: Row[]) => void} */
    const append = (siblings) => {
      for (const row of siblings) {
        sorted.append(row.element);
        append(row.below);
      }
    };
    append(this.roots);
    this.body.append(sorted);
    this.show();
  }

  /**
   * Put the rows under headings; groups are offered for tables without a tree only.
   * @param {number | null} choice which way of those that the report has; null puts them as they were
   */
  group(choice) {
    for (const heading of this.headings) heading.element.remove();
    this.headings = [];
    this.roots = [...this.rows];
    if (choice !== null) {
      /** @type {Grouping} */
      const grouping = JSON.parse(this.data?.textContent ?? "[]")[choice];
      this.headings = grouping.groups.map(({ name, rows, sums }, index) =>
        this.rowOf(headingElement(name, rows, sums, this.headers), index, name)
      );
      for (const row of this.rows) this.headings[grouping.members[row.index]].below.push(row);
      this.roots = [...this.headings];
    }
    this.table.classList.toggle("grouped", choice !== null);
    for (const button of this.folding ?? []) button.hidden = choice === null;
    this.arrange();
  }
}

/**
 * What a row is sorted by; null is not measured.
 * @param {Row} row
 * @param {Order} order
 * @returns {string | number | null}
 */
function keyOf(row, order) {
  const cell = row.element.cells[order.column];
  if (row.group !== null && order.column === 0) return row.group;
  if (row.group !== null && !("v" in cell.dataset)) return keyOf(row.below[0], order);
  if (order.isNumber) return "v" in cell.dataset ? Number(cell.dataset.v) : null;
  return cell.classList.contains("none") ? null : cell.textContent;
}

/**
 * @param {string} name
 * @param {string} rows how many there are, in words
 * @param {(Sum | null)[]} sums
 * @param {HTMLTableCellElement[]} headers
 */
function headingElement(name, rows, sums, headers) {
  const element = document.createElement("tr");
  element.className = "group";
  const head = document.createElement("th");
  head.scope = "row";
  head.dataset.group = name;
  const twist = document.createElement("button");
  twist.type = "button";
  twist.className = "twist";
  twist.setAttribute("aria-expanded", "true");
  twist.setAttribute("aria-label", `Rows of ${name}`);
  const label = document.createElement("span");
  label.title = name;
  label.textContent = name;
  const count = document.createElement("span");
  count.className = "count";
  count.textContent = rows;
  head.append(twist, label, count);
  element.append(head, ...sums.map((sum, place) => sumElement(sum, headers[place + 1].classList.contains("n"))));
  return element;
}

/**
 * @param {Sum | null} sum null where a column does not add up
 * @param {boolean} isNumber
 */
function sumElement(sum, isNumber) {
  const cell = document.createElement("td");
  cell.classList.toggle("n", isNumber);
  if (sum === null) return cell;
  cell.textContent = sum.text;
  cell.title = sum.about;
  if (sum.value !== null) cell.dataset.v = String(sum.value);
  if (sum.bar !== null) cell.classList.add("ratio", ...(sum.bar > 0 ? ["bar"] : []));
  if (sum.bar !== null) cell.style.setProperty("--r", sum.bar.toFixed(3));
  return cell;
}
