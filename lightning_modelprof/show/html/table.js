// Tables that sort, search, fold and group rows. Nothing is computed or rounded here: the report wrote every text
// and every sum. Rows are built when they first become visible or the page requests them.

import { countRows, isMissing, textOf, valueOf, wholeText } from "./cells.js";
import { columnMenu } from "./columns.js";
import { copyText, tableAsCsv, tableAsMarkdown } from "./copying.js";
import { heading, make } from "./dom.js";
import { textWithPlace } from "./places.js";
import { RowLink } from "./rows.js";

/** @typedef {import("./cells.js").Cell} Cell */
/** @typedef {import("./cells.js").Group} Group */
/** @typedef {import("./cells.js").TableData} TableData */

/**
 * @typedef {Object} Row
 * @property {Cell[]} cells
 * @property {number} index its original place
 * @property {number} depth
 * @property {boolean} isOpen
 * @property {boolean} isExpanded whether rows below it are listed
 * @property {Row[]} below
 * @property {Group | null} group whose heading it is
 * @property {string | null} text searched text; null until needed
 * @property {HTMLTableRowElement | null} element null until needed
 */

/** @typedef {{column: number, isNumber: boolean, sign: number}} Order */

/**
 * A reader's settings for a table; they may come from an address, which can contain anything.
 * @typedef {{sort?: string[], search?: string, group?: string, columns?: string[], all?: boolean}} TableLook
 */

/** @typedef {{row: Row, key: string | number | null}} Keyed */

const LONG = 12; // with fewer rows, there's no search
const MANY = 6; // with fewer columns, there's no menu to hide some

// A row is listed if its ancestors are open and it's among the first of its siblings or, during a search, if it or
// a row below it has every word. The headings of groups are rows above those of the group.
export class SortableTable {
  /**
   * @param {TableData} data
   * @param {TableLook} look as the reader left it
   * @param {(look: TableLook) => void} onChange gets the reader's changes, without defaults
   */
  constructor(data, look = {}, onChange = () => {}) {
    this.data = data;
    this.lookAtFirst = look;
    this.onChange = () => onChange(this.look());
    this.limit = data.limit;
    /** @type {string[]} */
    this.words = [];
    /** @type {Order | null} */
    this.order = null;
    /** @type {Row[]} */
    this.rows = [];
    /** @type {Row[]} */
    this.roots = [];
    /** @type {Row[]} */
    this.headings = [];
    /** @type {Row[]} visible ones, in their order */
    this.listed = [];
    /** @type {Row | null} that a link led to */
    this.current = null;
    this.isOnPaper = false;
    /** @type {WeakMap<Element, Row>} */
    this.rowOf = new WeakMap();
    this.seen = data.headers.map((_, place) => place).filter((place) => !data.hidden.includes(place));
    this.keysAtFirst = this.seenKeys();
    const title = [heading(data.title, data.about), " ", make("span", { class: "unit" }, data.unit)];
    this.element = make("section", { class: "table", id: `table-${data.id}` });
    /** @type {HTMLDetailsElement | null} */
    this.details = null;
    if (data.is_folded) {
      const count = make("span", { class: "count" }, countRows(data.rows.length));
      this.details = make("details", { ontoggle: () => this.fill() }, make("summary", {}, ...title, " ", count));
      this.element.append(this.details);
    } else {
      this.element.append(...title, " ");
      this.fill();
    }
  }

  /** Build the part below the title, once. */
  fill() {
    if (this.body) return;
    const { data } = this;
    /** @type {Row[]} */
    const above = [];
    this.rows = data.rows.map((cells, index) => {
      const depth = data.depths[index] ?? 0;
      const row = newRow(cells, index, depth, null);
      above.length = Math.min(above.length, depth);
      (above.length ? above[above.length - 1].below : this.roots).push(row);
      while (above.length < depth) above.push(row); // a skipped level
      above.push(row);
      return row;
    });
    for (const row of this.rows) row.isOpen = !this.hasTwist(row) || row.depth < data.open_depth;
    this.head = make("thead");
    this.body = make("tbody");
    this.table = make("table", { class: data.is_tree && "tree" }, this.head, this.body);
    this.scroll = make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": data.title }, this.table);
    this.link = data.no_slices && new RowLink(this, data.no_slices);
    const bars = "Bars to the left show decreases; bars to the right show increases.";
    const tones = data.tones.map(([tone, word]) => make("li", {}, make("i", { class: tone }), word));
    (this.details ?? this.element).append(
      this.makeTools(),
      this.scroll,
      ...(tones.length ? [make("ul", { class: "legend tones" }, make("li", {}, bars), ...tones)] : []),
      ...data.notes.map((note) => make("p", { class: "note" }, note)),
    );
    this.restore(this.lookAtFirst);
  }

  makeTools() {
    const { data } = this;
    /** @type {(text: string, name: string, act: () => void) => HTMLButtonElement} */
    const button = (text, name, act) => make("button", { type: "button", "data-do": name, onclick: act }, text);
    const isLong = data.rows.length > LONG || data.is_tree;
    const tools = make("div", { class: `tools${isLong || data.groupings.length ? "" : " brief"}` });
    this.said = make("output");
    /** @type {HTMLInputElement | null} */
    this.searched = null;
    if (isLong) {
      const search = make("input", { type: "search", autocomplete: "off", spellcheck: "false" });
      search.addEventListener("input", () => {
        this.search(search.value);
        this.onChange();
      });
      this.searched = search;
      tools.append(make("label", {}, "Search ", search));
    }
    if (data.groupings.length) {
      const ways = data.groupings.map(({ label }, place) => make("option", { value: String(place) }, label));
      this.choice = make("select", {}, make("option", { value: "" }, "none"), ...ways);
      this.choice.addEventListener("change", () => {
        this.regroup();
        this.onChange();
      });
      tools.append(make("label", {}, "Group by ", this.choice));
    }
    this.folding = [
      button("Expand all", "open", () => this.openAll(true)),
      button("Collapse all", "close", () => this.openAll(false)),
    ];
    for (const one of this.folding) one.hidden = !data.is_tree;
    if (data.is_tree || data.groupings.length) tools.append(...this.folding);
    this.all = button("Show all rows", "all", () => {
      this.showAll();
      this.show();
      this.onChange();
    });
    if (data.rows.length > data.limit) tools.append(this.all);
    if (data.headers.length > MANY) tools.append(columnMenu(this));
    const csv = button("Copy as CSV", "csv", () => this.copy(tableAsCsv(this)));
    csv.title = "Copy visible rows and columns with raw numbers, for a spreadsheet";
    const markdown = button("Copy as Markdown", "markdown", () => this.copy(tableAsMarkdown(this)));
    markdown.title = "Copy visible rows and columns, for an issue or message";
    tools.append(csv, markdown, this.said);
    return tools;
  }

  /** @param {{text: string, count: number}} copied */
  async copy({ text, count }) {
    const isDone = await copyText(text);
    if (this.said) this.said.textContent = isDone ? `Copied ${countRows(count)}` : "The browser doesn't allow copying";
  }

  /**
   * Whether a button folds the rows below a row.
   * @param {Row} row
   */
  hasTwist(row) {
    return row.group !== null || (this.data.is_tree && row.below.length > 0);
  }

  /**
   * Make a row visible, opening everything that hides it, and mark it.
   * @param {number} index
   */
  reveal(index) {
    if (this.details) this.details.open = true;
    this.fill();
    const row = this.rows[index];
    /** @type {(siblings: Row[]) => boolean} */
    const open = (siblings) =>
      siblings.some((one, rank) => {
        if (one !== row && !open(one.below)) return false;
        if (one !== row) one.isOpen = true;
        if (rank >= this.limit && one.group === null) this.showAll();
        return true;
      });
    open(this.roots);
    this.mark(row);
    this.show();
    if (!this.listed.includes(row)) this.search("");
    this.elementOf(row).scrollIntoView({ block: "center", inline: "nearest" });
  }

  /** @param {Row | null} row */
  mark(row) {
    this.current?.element?.removeAttribute("aria-current");
    this.current = row;
    row?.element?.setAttribute("aria-current", "true");
  }

  showAll() {
    this.limit = Infinity;
    if (this.all === document.activeElement) this.scroll?.focus({ preventScroll: true });
    this.all?.remove();
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
    this.show();
  }

  /** @param {Row} row */
  matches(row) {
    row.text ??= row.cells
      .filter((cell, place) => place === 0 || !(this.data.headers[place].is_number || isMissing(cell))) // no numbers
      .map((cell) => `${textOf(cell)} ${wholeText(cell)}`)
      .join(" ")
      .toLowerCase();
    const { text } = row;
    return this.words.every((word) => text.includes(word));
  }

  /**
   * Paper has all rows except those that a search left out.
   * @param {boolean} isOnPaper
   */
  print(isOnPaper) {
    this.fill();
    this.isOnPaper = isOnPaper;
    this.show();
  }

  show() {
    const isSearch = this.words.length > 0;
    let found = 0;
    /** @type {Row[]} */
    const listed = [];
    /** @type {(siblings: Row[], isVisible: boolean) => boolean} */
    const visit = (siblings, isVisible) => {
      if (!isSearch && !isVisible) return false;
      let anyFound = false;
      siblings.forEach((row, rank) => {
        const isHeading = row.group !== null;
        const isFound = isSearch && !isHeading && this.matches(row);
        const isShown = !isSearch && (this.isOnPaper || isHeading || rank < this.limit);
        const place = listed.push(row) - 1;
        const isAnyBelow = visit(row.below, isShown && (this.isOnPaper || row.isOpen));
        if (!(isSearch ? isFound || isAnyBelow : isShown)) listed.length = place;
        if (!isHeading && (isSearch ? isFound : isShown)) found += 1;
        row.isExpanded = isSearch ? isAnyBelow : row.isOpen;
        anyFound ||= isFound || isAnyBelow;
      });
      return anyFound;
    };
    visit(this.roots, true);
    this.listed = listed;
    this.layRows();
    this.link?.settle();
    if (this.searched && this.said) {
      const [seen, total, groups] = [found, this.rows.length, this.headings.length].map((n) => n.toLocaleString("en"));
      this.said.textContent = `${this.headings.length ? `${groups} groups, ` : ""}${seen} of ${total} rows`;
    }
  }

  // Rows that stay aren't moved, so that they keep the keyboard focus.
  layRows() {
    const { body } = this;
    if (!body) return;
    const wanted = new Set(this.listed.map((row) => this.elementOf(row)));
    for (const element of Array.from(body.rows)) if (!wanted.has(element)) element.remove();
    /** @type {Element | null} */
    let at = body.firstElementChild;
    for (const element of wanted) {
      if (element === at) at = at.nextElementSibling;
      else body.insertBefore(element, at);
    }
    for (const row of this.listed) {
      if (this.hasTwist(row)) row.element?.querySelector(".twist")?.setAttribute("aria-expanded", String(row.isExpanded));
    }
  }

  /**
   * @param {Row} row
   * @returns {HTMLTableRowElement}
   */
  elementOf(row) {
    if (row.element === null) {
      row.element = this.makeRow(row);
      this.rowOf.set(row.element, row);
      if (row === this.current) row.element.setAttribute("aria-current", "true");
    }
    return row.element;
  }

  /** @param {Row} row */
  makeRow(row) {
    const [name] = row.cells;
    const head = make("th", { scope: "row", title: (row.group === null && this.data.abouts[row.index]) || false });
    if (row.depth) head.style.setProperty("--d", String(row.depth));
    if (this.hasTwist(row)) {
      const label = row.group ? `Rows of ${row.group.name}` : `Rows below ${textOf(name)}`;
      const fold = () => {
        row.isOpen = !row.isOpen;
        this.show();
      };
      head.append(make("button", { type: "button", class: "twist", "aria-label": label, onclick: fold }));
    }
    if (row.group) {
      const count = make("span", { class: "count" }, countRows(row.group.num_rows));
      head.append(make("span", { title: row.group.name }, row.group.name), count);
    } else {
      head.append(...contentOf(name));
    }
    const element = document.createElement("tr");
    if (row.group) element.className = "group";
    element.append(head, ...this.seen.slice(1).map((place) => this.makeCell(row, place)));
    return element;
  }

  /**
   * @param {Row} row
   * @param {number} place of its column
   */
  makeCell({ cells, group }, place) {
    const cell = cells[place];
    const value = valueOf(cell);
    const { is_number: isNumber, is_share: isShare } = this.data.headers[place];
    const element = document.createElement("td");
    if (group) element.title = sumOf(group, place);
    if (isMissing(cell)) {
      element.className = "n none";
      element.textContent = textOf(cell);
    } else if (isNumber) {
      const change = typeof cell === "string" ? undefined : cell[3];
      const share = isShare && value !== null ? Math.min(Math.max(value, 0), 1) : null;
      element.className = `n${share === null ? "" : share ? " ratio bar" : " ratio"}`;
      if (share) element.style.setProperty("--r", share.toFixed(3));
      if (change) {
        const [left, width, tone, isCut] = change;
        element.classList.add("change", tone, ...(isCut ? ["cut"] : []));
        element.style.setProperty("--a", left.toFixed(4));
        element.style.setProperty("--w", width.toFixed(4));
      }
      element.textContent = textOf(cell);
    } else {
      element.append(...contentOf(cell));
    }
    return element;
  }

  makeHead() {
    const { groups, headers } = this.data;
    const above = [];
    let start = 0;
    for (const [label, span] of groups) {
      const end = start + span;
      const count = this.seen.filter((place) => place >= start && place < end).length;
      const colspan = String(count);
      if (count) above.push(label ? make("th", { scope: "colgroup", colspan }, label) : make("td", { colspan }));
      start = end;
    }
    const heads = this.seen.map((place) => {
      const { label, key, about, is_number: isNumber, is_sortable: isSortable } = headers[place];
      const name = isSortable ? make("button", { type: "button", onclick: () => this.sort(place) }, label) : label;
      const attributes = { scope: "col", class: isNumber && "n", "data-key": key, title: about || false };
      return make("th", { ...attributes, "aria-sort": this.directionOf(place) ?? false }, name);
    });
    this.head?.replaceChildren(...(above.length ? [make("tr", { class: "groups" }, ...above)] : []), make("tr", {}, ...heads));
  }

  /** Keys of the visible columns, without the first, which is always visible. */
  seenKeys() {
    return this.seen.slice(1).map((place) => this.data.headers[place].key);
  }

  /** @param {string[]} keys of those to show in addition to the first */
  showColumns(keys) {
    this.seen = this.data.headers.map((_, place) => place);
    this.seen = this.seen.filter((place) => place === 0 || keys.includes(this.data.headers[place].key));
    for (const row of [...this.rows, ...this.headings]) row.element = null;
    this.makeHead();
    this.show();
  }

  /** @returns {TableLook} */
  look() {
    const { order } = this;
    const keys = this.seenKeys();
    const chosen = this.choice?.value ? this.choice.selectedOptions[0].text : "";
    const direction = order && order.sign < 0 ? "descending" : "ascending";
    return {
      ...(order && { sort: [this.data.headers[order.column].key, direction] }),
      ...(this.words.length && { search: this.searched?.value }),
      ...(chosen && { group: chosen }),
      ...(keys.join("\n") !== this.keysAtFirst.join("\n") && { columns: keys }),
      ...(this.limit === Infinity && { all: true }),
    };
  }

  /** @param {TableLook} look */
  restore({ sort, search, group, columns, all }) {
    if (all === true) this.showAll();
    const [key, direction] = Array.isArray(sort) ? sort : [];
    const column = this.data.headers.findIndex((header) => key && header.key === key);
    if (column >= 0 && this.data.headers[column].is_sortable) this.setOrder(column, direction);
    const option = Array.from(this.choice?.options ?? []).find(({ value, text }) => value && text === group);
    if (option) option.selected = true;
    if (typeof search === "string" && this.searched) {
      this.searched.value = search;
      this.words = search.toLowerCase().split(/\s+/).filter(Boolean);
    }
    if (Array.isArray(columns)) this.showColumns(columns);
    else this.makeHead();
    if (option) this.regroup();
    else this.arrange();
  }

  regroup() {
    const value = this.choice?.value ?? "";
    this.group(value === "" ? null : Number(value));
  }

  /**
   * The direction in which a column orders the rows, for its arrow; null if it doesn't.
   * @param {number} column
   */
  directionOf(column) {
    if (this.order) return this.order.column !== column ? null : this.order.sign < 0 ? "descending" : "ascending";
    return this.data.sorted_by === column ? "descending" : null;
  }

  /**
   * Sorts largest first (names: first to last), then reversed, then in the original order. Missing values stay last.
   * In a tree, the rows below one row are sorted among themselves.
   * @param {number} column
   */
  sort(column) {
    const isNumber = this.data.headers[column].is_number;
    const cycle = isNumber ? ["descending", "ascending"] : ["ascending", "descending"];
    this.setOrder(column, cycle[cycle.indexOf(this.directionOf(column) ?? "") + 1]);
    this.arrange();
    this.onChange();
  }

  /**
   * @param {number} column
   * @param {string | undefined} direction undefined for the original order
   */
  setOrder(column, direction) {
    const { is_number: isNumber } = this.data.headers[column];
    this.order = direction ? { column, isNumber, sign: direction === "descending" ? -1 : 1 } : null;
    const heads = Array.from(this.head?.lastElementChild?.children ?? []);
    heads.forEach((head, number) => {
      const shown = this.directionOf(this.seen[number]);
      if (shown) head.setAttribute("aria-sort", shown);
      else head.removeAttribute("aria-sort");
    });
  }

  // Groups are sorted by their sums; by their first row if a column has none, and by name in the name column.
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
    this.show();
  }

  /**
   * Put the rows under headings; only tables without a tree offer groups.
   * @param {number | null} choice index of one of the report's groupings; null removes the headings
   */
  group(choice) {
    this.headings = [];
    this.roots = [...this.rows];
    if (choice !== null) {
      const { groups, members } = this.data.groupings[choice];
      this.headings = groups.map((one, index) => newRow([one.name, ...one.sums.map((sum) => sum ?? "")], index, 0, one));
      for (const row of this.rows) this.headings[members[row.index]].below.push(row);
      this.roots = [...this.headings];
    }
    this.table?.classList.toggle("grouped", choice !== null);
    for (const button of this.folding ?? []) button.hidden = choice === null;
    this.arrange();
  }
}

/**
 * @param {Cell[]} cells
 * @param {number} index
 * @param {number} depth
 * @param {Group | null} group
 * @returns {Row}
 */
function newRow(cells, index, depth, group) {
  return { cells, index, depth, isOpen: true, isExpanded: true, below: [], group, text: null, element: null };
}

/**
 * Sort key of a row; null if not measured.
 * @param {Row} row
 * @param {Order} order
 * @returns {string | number | null}
 */
function keyOf(row, order) {
  const cell = row.cells[order.column];
  if (row.group && order.column === 0) return row.group.name;
  if (row.group && valueOf(cell) === null) return keyOf(row.below[0], order);
  return order.isNumber ? valueOf(cell) : isMissing(cell) ? null : textOf(cell);
}

/**
 * The text, with the place in code in it as a button that copies it.
 * @param {Cell} cell
 * @returns {(Node | string)[]}
 */
function contentOf(cell) {
  const text = textOf(cell);
  const full = typeof cell === "string" ? "" : cell[2];
  const content = textWithPlace(text, full || text);
  return full ? [make("span", { title: full }, ...content)] : content;
}

/**
 * @param {Group} group
 * @param {number} place of a column
 */
function sumOf({ num_known: known, num_rows: rows, sums }, place) {
  const isPartial = sums[place - 1] !== null && known[place - 1] < rows;
  return isPartial ? `Sum of ${known[place - 1]} of ${rows} rows; the others have no value.` : "";
}
