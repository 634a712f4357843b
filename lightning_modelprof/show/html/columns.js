// Which columns of a table are seen: the class h3 of a table hides its third column.

/**
 * @param {HTMLTableElement} table
 * @param {number} place from 0
 */
export function isColumnHidden(table, place) {
  return table.classList.contains(`h${place + 1}`);
}

/** The menu of a table's columns; its content is made when it is first opened. */
export class ColumnMenu {
  static most = 40; // columns that can be hidden, of which there are rules in parts.css

  /**
   * @param {HTMLTableElement} table
   * @param {HTMLDetailsElement | null} menu
   * @param {() => void} onChange
   */
  constructor(table, menu, onChange) {
    this.table = table;
    this.menu = menu;
    this.onChange = onChange;
    const head = /** @type {HTMLTableSectionElement} */ (table.tHead);
    this.headers = Array.from(head.rows[head.rows.length - 1].cells).slice(0, ColumnMenu.most);
    /** @type {HTMLTableCellElement[]} */
    this.groups = head.rows.length > 1 ? Array.from(head.rows[0].cells) : [];
    this.atFirst = this.seen();
    /** @type {HTMLInputElement[]} */
    this.boxes = [];
    const outside = (/** @type {Event} */ { target }) => {
      if (menu && !menu.contains(/** @type {Node} */ (target))) menu.open = false;
    };
    menu?.querySelector("summary")?.addEventListener("click", () => {
      if (!this.boxes.length) this.fill(menu);
    });
    menu?.addEventListener("toggle", () => {
      if (menu.open) document.addEventListener("pointerdown", outside);
      else document.removeEventListener("pointerdown", outside);
    });
    menu?.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !menu.open) return;
      event.stopPropagation();
      menu.open = false;
      menu.querySelector("summary")?.focus();
    });
    menu?.addEventListener("focusout", ({ relatedTarget }) => {
      if (relatedTarget instanceof Node && !menu.contains(relatedTarget)) menu.open = false;
    });
  }

  /** Keys of the columns that are seen, without the first, which always is. */
  seen() {
    const keys = this.headers.map(({ dataset }) => dataset.key ?? "");
    return keys.filter((_, place) => place > 0 && !isColumnHidden(this.table, place));
  }

  /** @returns {string[] | undefined} those that are seen, if they are not those of the begin */
  look() {
    const seen = this.seen();
    return seen.join("\n") === this.atFirst.join("\n") ? undefined : seen;
  }

  /** @param {string[]} keys */
  show(keys) {
    this.headers.forEach(({ dataset }, place) => {
      this.table.classList.toggle(`h${place + 1}`, place > 0 && !keys.includes(dataset.key ?? ""));
    });
    let place = 0;
    for (const group of this.groups) {
      const span = Number(group.dataset.span);
      const columns = Array.from({ length: span }, (_, number) => place + number);
      const seen = columns.filter((one) => !isColumnHidden(this.table, one)).length;
      group.hidden = !seen;
      group.colSpan = Math.max(1, seen);
      place += span;
    }
    this.boxes.forEach((box) => {
      box.checked = keys.includes(box.value);
    });
  }

  /** @param {HTMLDetailsElement} menu */
  fill(menu) {
    const content = document.createElement("div");
    const buttons = document.createElement("p");
    const choose = (/** @type {string[]} */ keys) => {
      this.show(keys);
      this.onChange();
    };
    const keys = () => this.boxes.map((box) => box.value);
    /** @type {[string, () => string[]][]} */
    const ways = [["All", keys], ["Default", () => this.atFirst]];
    for (const [text, which] of ways) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.addEventListener("click", () => choose(which()));
      buttons.append(button);
    }
    content.append(buttons);
    for (const header of this.headers.slice(1)) {
      const label = document.createElement("label");
      const box = document.createElement("input");
      box.type = "checkbox";
      box.value = header.dataset.key ?? "";
      box.addEventListener("change", () => choose(this.boxes.filter((one) => one.checked).map((one) => one.value)));
      label.append(box, ` ${header.dataset.full ?? ""}`);
      this.boxes.push(box);
      content.append(label);
    }
    menu.append(content);
    this.show(this.seen());
  }
}
