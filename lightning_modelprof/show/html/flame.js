// Flame graphs. A click or Enter makes a box as wide as the graph; Escape, the button, or the outermost box shows
// the whole graph again.

import { heading, make } from "./dom.js";
import { copyPlace, openStack, placeButton } from "./places.js";

/**
 * @typedef {Object} FlameData
 * @property {string} id
 * @property {string} title
 * @property {string} about
 * @property {string} total that the full width represents
 * @property {[left: number, width: number, row: number, kind: string, text: string, at: string, about: string][]} boxes
 * @property {number} rows how deep it is
 * @property {[kind: string, word: string][]} kinds
 * @property {boolean} has_places
 * @property {string[]} notes
 */

/**
 * @typedef {Object} Box
 * @property {HTMLElement} element
 * @property {number} x left edge as a share of the whole graph
 * @property {number} width share of the whole graph
 * @property {number} row 0 at the top
 * @property {string} text
 * @property {string} at file and line; "" if it has none
 * @property {string} about the whole name, and its time on a second line
 * @property {boolean} isShown
 * @property {number} left edge as a share of the visible part
 * @property {number} right
 */

export class FlameGraph {
  static roomForText = 24; // points
  static paperWidth = 1000;
  static many = 12; // with fewer boxes, there's no search

  /**
   * @param {FlameData} data
   * @param {{zoom?: number, search?: string}} look as the reader left it
   * @param {(look: {zoom?: number, search?: string}) => void} onChange
   */
  constructor(data, look = {}, onChange = () => {}) {
    this.onChange = onChange;
    /** @type {Box[]} */
    this.boxes = data.boxes.map(([x, width, row, kind, text, at, about]) => {
      const element = boxElement(x, width, row, kind, text, about);
      return { element, x, width, row, text, at, about, isShown: true, left: x, right: Math.min(1, x + width) };
    });
    /** @type {Map<Element | null, Box>} */
    this.boxOf = new Map(this.boxes.map((box) => [box.element, box]));
    /** @type {HTMLInputElement | null} */
    this.search = null;
    if (data.boxes.length > FlameGraph.many) {
      this.search = make("input", { type: "search", autocomplete: "off", spellcheck: "false" });
    }
    this.reset = make("button", { type: "button", "data-do": "reset", disabled: true }, "Show all");
    /** @type {HTMLButtonElement | null} */
    this.stack = null;
    if (data.has_places) {
      const attributes = { type: "button", "data-do": "stack", "aria-haspopup": "dialog", disabled: true };
      this.stack = make("button", attributes, "Call stack");
    }
    this.found = make("output");
    const keys = "Arrow keys move, Enter zooms, Escape shows all";
    const label = `${data.title}. ${keys}${data.has_places ? ", C copies the line, S shows the call stack" : ""}.`;
    const elements = this.boxes.map(({ element }) => element);
    this.frame = make("div", { class: "boxes", role: "tree", "aria-label": label }, ...elements);
    this.frame.style.setProperty("--rows", String(data.rows));
    this.line = make("p", { class: "about", "aria-live": "polite" });
    const kinds = data.kinds.map(([kind, word]) => make("li", {}, make("i", { class: kind }), word));
    this.element = make(
      "figure",
      { class: "flame", id: `flame-${data.id}` },
      make("figcaption", {}, heading(data.title, data.about), " ", make("span", { class: "unit" }, `${data.total} in total`)),
      make(
        "div",
        { class: "tools" },
        ...(this.search ? [make("label", {}, "Search ", this.search)] : []),
        this.reset,
        ...(this.stack ? [this.stack] : []),
        this.found,
      ),
      ...(kinds.length ? [make("ul", { class: "legend" }, ...kinds)] : []),
      this.frame,
      this.line,
      ...data.notes.map((note) => make("p", { class: "note" }, note)),
    );
    /** @type {Box | null} */
    this.zoomed = null;
    this.isOnPaper = false;
    this.current = this.boxes[0];
    this.current.element.tabIndex = 0;
    this.listen();
    this.restore(look);
    this.tell(undefined);
    new ResizeObserver(() => this.show()).observe(this.frame);
  }

  listen() {
    /** @param {Event} event */
    const boxOf = (event) => this.boxOf.get(/** @type {Element} */ (event.target).closest(".box"));
    /** @param {Event} event */
    const look = (event) => this.tell(boxOf(event));
    this.frame.addEventListener("click", (event) => {
      const box = boxOf(event);
      if (box) this.zoom(box);
    });
    this.frame.addEventListener("pointerover", look);
    this.frame.addEventListener("focusin", look);
    this.frame.addEventListener("pointerleave", () => this.tell(this.boxOf.get(document.activeElement)));
    this.frame.addEventListener("focusout", (event) => {
      const to = /** @type {Node | null} */ (event.relatedTarget);
      if (!this.line.contains(to) && to !== this.stack) this.tell(undefined);
    });
    this.line.addEventListener("mousedown", (event) => event.preventDefault()); // focus would change the line
    this.stack?.addEventListener("click", () => this.showStack(this.current));
    this.frame.addEventListener("keydown", (event) => this.press(event));
    this.reset.addEventListener("click", () => {
      const isFocused = this.reset === document.activeElement; // until it's disabled
      this.zoom(null);
      if (isFocused) this.choose(this.current);
    });
    this.search?.addEventListener("input", () => {
      this.find();
      this.onChange(this.look());
    });
  }

  /**
   * Paper shows the whole graph, because it can't be zoomed.
   * @param {boolean} isOnPaper
   */
  print(isOnPaper) {
    this.isOnPaper = isOnPaper;
    this.show();
  }

  /** @param {Box | undefined} box */
  tell(box) {
    /** @param {Box} one */
    const about = (one) => one.about.replace("\n", ": ");
    const hint = "Hover to see the time; click or press Enter to zoom.";
    const one = box ?? this.zoomed;
    this.line.textContent = box ? about(box) : this.zoomed ? `Zoomed: ${about(this.zoomed)}` : hint;
    this.line.classList.toggle("hint", !one);
    if (one) this.offerPlace(one);
  }

  /**
   * The place in the line is a button that copies it.
   * @param {Box} box
   */
  offerPlace({ at }) {
    const text = this.line.textContent ?? "";
    const seen = [at, at.split("/").pop() ?? ""].find((one) => one && text.includes(`, ${one}`));
    if (!seen) return;
    const start = text.indexOf(`, ${seen}`) + 2;
    this.line.replaceChildren(text.slice(0, start), placeButton(at, seen), text.slice(start + seen.length));
  }

  /** @param {Box} box */
  showStack(box) {
    const calls = [];
    for (let one = /** @type {Box | undefined} */ (box); one; one = this.around(one)) {
      calls.push({ name: one.text, at: one.at });
    }
    openStack(box.isShown ? box.element : this.frame, calls);
  }

  /** @param {Box | null} box null for all */
  zoom(box) {
    this.zoomed = box && box.width < 1 ? box : null;
    this.reset.disabled = this.zoomed === null;
    this.show();
    if (box) this.choose(box);
    this.tell(box ?? undefined);
    this.onChange(this.look());
  }

  look() {
    const search = this.search?.value.trim();
    return { ...(this.zoomed && { zoom: this.boxes.indexOf(this.zoomed) }), ...(search && { search }) };
  }

  /** @param {{zoom?: number, search?: string}} look */
  restore({ zoom, search }) {
    const box = Number.isInteger(zoom) ? this.boxes[/** @type {number} */ (zoom)] : undefined;
    if (box && box.width < 1) this.zoomed = box;
    this.reset.disabled = this.zoomed === null;
    if (typeof search === "string" && this.search) {
      this.search.value = search;
      this.find();
    }
  }

  // Boxes next to the zoomed one vanish; those around it become as wide as the graph.
  show() {
    const zoomed = this.isOnPaper ? null : this.zoomed;
    const points = this.isOnPaper ? FlameGraph.paperWidth : this.frame.clientWidth;
    const { x, width } = zoomed ?? { x: 0, width: 1 };
    const noise = 1e-4; // rounding error of boxes that only touch
    for (const box of this.boxes) {
      const left = Math.max(0, (box.x - x) / width);
      const right = Math.min(1, (box.x + box.width - x) / width);
      const { element } = box;
      box.isShown = zoomed === null || right - left > Math.min(noise, (0.5 * box.width) / width);
      element.hidden = !box.isShown;
      if (!box.isShown) continue;
      if (left !== box.left || right !== box.right) {
        element.style.setProperty("--x", String(left));
        element.style.setProperty("--w", String(right - left));
        Object.assign(box, { left, right });
      }
      element.classList.toggle("narrow", (right - left) * points < FlameGraph.roomForText);
      element.classList.toggle("around", zoomed !== null && box.row < zoomed.row);
    }
  }

  // Same words as in tables. Boxes inside matching boxes don't count twice.
  find() {
    const words = (this.search?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    /** @param {Box} box */
    const isFound = (box) => {
      const name = box.about.split("\n")[0].toLowerCase(); // includes the place, but no numbers
      return words.every((word) => name.includes(word));
    };
    const found = words.length ? this.boxes.filter(isFound) : [];
    for (const { element } of this.boxes) element.classList.remove("found");
    for (const { element } of found) element.classList.add("found");
    this.frame.classList.toggle("searched", words.length > 0);
    let share = 0;
    let end = 0;
    for (const { x, width } of [...found].sort((a, b) => a.x - b.x)) {
      share += Math.max(0, x + width - Math.max(x, end));
      end = Math.max(end, x + width);
    }
    const boxes = found.length === 1 ? "box" : "boxes";
    const percent = !share ? "0" : share < 0.00005 ? "less than 0.01" : (100 * share).toFixed(2);
    this.found.textContent = words.length ? `${found.length.toLocaleString("en")} ${boxes}, ${percent}%` : "";
  }

  /** @param {Box} box */
  choose(box) {
    this.current.element.tabIndex = -1;
    this.current = box;
    if (this.stack) this.stack.disabled = false;
    box.element.tabIndex = 0;
    box.element.focus({ preventScroll: true });
    box.element.scrollIntoView({ block: "nearest" });
  }

  /** @param {KeyboardEvent} event */
  press(event) {
    const box = this.boxOf.get(/** @type {Element} */ (event.target));
    if (!box) return;
    /** @type {Record<string, () => void>} */
    const actions = {
      Enter: () => this.zoom(box),
      " ": () => this.zoom(box),
      Escape: () => this.zoom(null),
      ...(this.stack && { s: () => this.showStack(box), c: () => this.copy(box) }),
      Home: () => this.move(this.boxes[0]),
      ArrowUp: () => this.move(this.around(box)),
      ArrowDown: () => this.move(this.widestIn(box)),
      ArrowLeft: () => this.move(this.beside(box, -1)),
      ArrowRight: () => this.move(this.beside(box, 1)),
    };
    if (!Object.hasOwn(actions, event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  /** @param {Box} box */
  copy({ element, at }) {
    if (at) copyPlace(element, at);
  }

  /** @param {Box | undefined} box */
  move(box) {
    if (box) this.choose(box);
  }

  /** @param {Box} box */
  around(box) {
    const middle = box.x + box.width / 2;
    return this.boxes.find(
      (other) => other.row === box.row - 1 && other.x <= middle && middle <= other.x + other.width
    );
  }

  /** @param {Box} box */
  widestIn(box) {
    const inside = this.boxes.filter((other) => other.isShown && this.around(other) === box);
    const most = Math.max(...inside.map((other) => other.width));
    return inside.find((other) => other.width === most);
  }

  /**
   * @param {Box} box
   * @param {number} step
   * @returns {Box | undefined}
   */
  beside(box, step) {
    const row = this.boxes.filter((other) => other.isShown && other.row === box.row);
    row.sort((a, b) => a.x - b.x);
    return row[row.indexOf(box) + step];
  }
}

/**
 * @param {number} x
 * @param {number} width
 * @param {number} row
 * @param {string} kind
 * @param {string} text
 * @param {string} about
 */
function boxElement(x, width, row, kind, text, about) {
  const attributes = { class: `box ${kind}`, role: "treeitem", "aria-level": String(1 + row), tabindex: "-1", title: about };
  const element = make("div", attributes, make("bdi", {}, text));
  for (const [name, share] of Object.entries({ "--x": x, "--w": width, "--y": row })) {
    element.style.setProperty(name, String(share));
  }
  return element;
}
