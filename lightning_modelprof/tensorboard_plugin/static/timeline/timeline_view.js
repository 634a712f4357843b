// The timeline's state and its changes. Drawing and input are separate modules.

import { Body } from "./body.js";
import { Found } from "./search.js";
import { HEAD, Head } from "./head.js";
import { Layout, ROW } from "./layout.js";
import { Palette } from "./colors.js";
import { Shown } from "./shown.js";
import { Slices } from "./slices.js";
import { Viewport } from "./viewport.js";
import { checkedFind, labelOf, showFind } from "./find.js";
import { fillLanes, makeParts } from "./parts.js";
import { fillLegend, hiddenAtFirst } from "./legend.js";
import { fillToolbar, showFound } from "./toolbar.js";
import { formatCount } from "../format.js";
import { listen } from "./input.js";
import { make } from "../dom.js";
import { showRange } from "./range_panel.js";
import { showSelection, spoken } from "./panel.js";
import { showValues } from "./tooltip.js";

/** @typedef {import("./find.js").Find} Find */
/** @typedef {{begin: number, end: number, selected: number, search: string, range: [number, number] | null, folded: string[], hidden: string[], found: Find | null}} State `selected`: index in the packed columns; `folded`: keys of groups and lanes; `hidden`: categories; `found`: a link's target that has already been shown */
/** @typedef {Partial<Pick<State, "selected" | "search" | "range" | "folded" | "hidden" | "found">> & {zoom?: [number, number]}} Look the state without defaults; times are whole nanoseconds since the trace's start */
/** @typedef {{onChange?: (look: Look) => void, linkTo?: (look: Look) => string, initial?: Look & {find?: Find}, title?: string, trace?: import("./toolbar.js").TraceFile | null}} Options `linkTo`: the address of a look */

const QUIET_MS = 200; // after the last change before it's reported

export class TimelineView {
  /**
   * @param {HTMLElement} container
   * @param {import("../columns.js").Unpacked} unpacked
   * @param {Options} options
   */
  constructor(container, unpacked, { onChange = () => {}, linkTo, initial = {}, title = "trace", trace = null }) {
    this.unpacked = unpacked;
    /** @type {string[]} */
    const categories = unpacked.meta.categories;
    const hidden = initial?.hidden;
    this.hidden = Array.isArray(hidden)
      ? new Set(categories.filter((category) => hidden.includes(category)))
      : hiddenAtFirst(categories);
    this.shown = new Shown(unpacked, this.hidden);
    /** @type {Slices | null} */
    this.whole = null;
    this.title = title;
    this.trace = trace;
    this.onChange = onChange;
    this.linkTo = linkTo;
    this.viewport = new Viewport(this.slices.traceBegin, this.slices.traceEnd);
    /** @type {Set<string>} */
    this.folded = new Set(Array.isArray(initial?.folded) ? initial.folded : []);
    this.layout = new Layout(this.slices, this.folded);
    /** @type {Find | null} what a link points at */
    this.find = null;
    this.found = new Found(this.slices, "");
    this.search = "";
    /** @type {string | Find} what is marked */
    this.marked = "";
    this.selected = -1;
    /** @type {[number, number] | null} */
    this.range = null;
    /** @type {number | null} time under the pointer */
    this.pointed = null;
    this.scrollTop = 0;
    this.height = 0;
    this.frame = 0;
    this.timer = 0;
    this.isRangeShown = true;
    this.parts = makeParts();
    container.append(this.parts.root);
    this.palette = new Palette(this.parts.root, this.slices);
    fillLegend(this);
    this.body = new Body(this);
    this.head = new Head(this);
    this.ends = [fillToolbar(this), listen(this)];
    this.arrange();
    this.viewport.show(this.slices.home[0], this.slices.home[1]);
    this.watch();
    this.take(initial ?? {});
    this.parts.notes.append(...this.slices.notes.map((text) => make("p", { class: "tl-hint" }, text)));
    showSelection(this, this.parts.selection);
    showRange(this, this.parts.range);
    showFound(this);
    this.forget(); // already in the address that led here
  }

  /**
   * Start with the valid parts of a link.
   * @param {Record<string, any>} state
   */
  take({ zoom, selected, search, range, find, found }) {
    const { traceBegin } = this.slices;
    const link = checkedFind(find);
    const isNew = JSON.stringify(link) !== JSON.stringify(checkedFind(found));
    if (typeof search === "string" && !(link && isNew)) {
      this.parts.search.value = search;
      this.setSearch(search);
    }
    if (isRange(range)) this.setRange([range[0] + traceBegin, range[1] + traceBegin]);
    if (Number.isInteger(selected) && selected >= 0 && selected < this.all.count && !(link && isNew)) {
      this.select(selected);
    }
    if (isRange(zoom)) this.zoomTo(zoom[0] + traceBegin, zoom[1] + traceBegin);
    this.find = link;
    if (link && (isNew || search === labelOf(link))) showFind(this, link, isNew);
  }

  /** The visible slices. */
  get slices() {
    return this.shown.slices;
  }

  /** All slices, by index in the packed columns. */
  get all() {
    if (!this.hidden.size) return this.slices;
    return (this.whole ??= new Slices(this.unpacked));
  }

  /** The selected slice's index among visible slices, -1 without one. */
  get at() {
    return this.shown.indexOf(this.selected);
  }

  watch() {
    const resize = new ResizeObserver(() => this.resize());
    resize.observe(this.parts.stage);
    resize.observe(this.parts.scroller);
    const repaint = () => {
      this.palette.read(this.parts.root);
      this.head.drawMap();
      this.draw();
    };
    const dark = matchMedia("(prefers-color-scheme: dark)");
    document.addEventListener("themechange", repaint);
    dark.addEventListener("change", repaint);
    const sharpness = watchSharpness(() => this.resize());
    this.parts.root.addEventListener("click", () => this.tell(), true); // a link may leave the view
    this.ends.push(() => {
      resize.disconnect();
      sharpness.abort();
      document.removeEventListener("themechange", repaint);
      dark.removeEventListener("change", repaint);
    });
  }

  resize() {
    const { scroller, canvas, head, top, lanes } = this.parts;
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(1, scroller.clientWidth - lanes.offsetWidth);
    this.height = scroller.clientHeight;
    this.viewport.width = width;
    const sizes = /** @type {[HTMLCanvasElement, number][]} */ ([[canvas, this.height], [head, HEAD]]);
    for (const [one, height] of sizes) {
      one.width = Math.round(width * ratio);
      one.height = Math.round(height * ratio);
      one.style.width = `${width}px`;
      one.style.height = `${height}px`;
    }
    top.style.paddingRight = `${scroller.offsetWidth - scroller.clientWidth}px`;
    this.head.drawMap();
    this.drawNow(); // a canvas with a new size is empty until it's drawn
  }

  /** Lanes were opened or closed. */
  arrange() {
    const { count } = this.slices;
    const all = this.shown.places ? ` of ${formatCount(this.shown.known?.length ?? 0)}` : "";
    this.parts.about.textContent = this.parts.about.title = `${formatCount(count)}${all} slices`;
    fillLanes(this.parts, this.layout, (item) => {
      this.layout.toggle(item);
      this.arrange();
      this.changed();
    });
    this.draw();
  }

  draw() {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.scrollTop = this.parts.scroller.scrollTop;
    this.head.draw();
    this.body.draw();
    showValues(this);
    if (!this.isRangeShown) {
      this.isRangeShown = true;
      showRange(this, this.parts.range);
    }
  }

  showPointed() {
    showValues(this);
  }

  /** @returns {State} */
  state() {
    const { begin, end } = this.viewport;
    return {
      begin, end, selected: this.selected, search: this.search, range: this.range, folded: [...this.folded],
      hidden: [...this.hidden], found: this.find,
    };
  }

  /** @returns {Look} */
  look() {
    const { selected, search, folded, hidden, found, ...state } = this.state();
    const { traceBegin, home, categories } = this.slices;
    const since = (/** @type {number[]} */ times) => /** @type {[number, number]} */ (times.map((ns) => Math.round(ns - traceBegin)));
    const [zoom, range] = [since([state.begin, state.end]), state.range && since(state.range)];
    const usual = hiddenAtFirst(categories);
    const isUsual = hidden.length === usual.size && hidden.every((one) => usual.has(one));
    return {
      ...(String(zoom) !== String(since(home)) && { zoom }), ...(selected >= 0 && { selected }), ...(search && { search }),
      ...(range && { range }), ...(folded.length && { folded }), ...(!isUsual && { hidden }), ...(found && { found }),
    };
  }

  changed() {
    this.draw();
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.tell(), QUIET_MS);
  }

  /** Report unreported changes. */
  tell() {
    if (!this.timer) return;
    this.forget();
    this.onChange(this.look());
  }

  /** Don't report the changes so far. */
  forget() {
    clearTimeout(this.timer);
    this.timer = 0;
  }

  /** @param {string} category */
  toggleKind(category) {
    this.hide(this.hidden.has(category) ? [...this.hidden].filter((one) => one !== category) : [...this.hidden, category]);
  }

  /**
   * Show all categories except some.
   * @param {Iterable<string>} categories
   */
  hide(categories) {
    this.hidden = new Set(categories);
    this.shown = new Shown(this.unpacked, this.hidden);
    this.layout = new Layout(this.slices, this.folded);
    this.found = new Found(this.slices, this.marked);
    fillLegend(this);
    this.arrange();
    this.head.drawMap();
    showFound(this);
    this.isRangeShown = false;
    this.changed();
  }

  /**
   * @param {number} place index in the packed columns, -1 for none
   * @param {boolean} [isSeen] whether the reader pointed at it: then nothing moves, so that a second click hits it, too
   */
  select(place, isSeen = false) {
    this.selected = place;
    showSelection(this, this.parts.selection);
    showFound(this);
    this.parts.live.textContent = spoken(this);
    if (this.at >= 0 && !isSeen) this.scrollTo(this.at);
    this.changed();
  }

  /**
   * Select a slice and bring its time and row into view, opening everything that hides it.
   * @param {number} place index in the packed columns
   */
  jumpTo(place) {
    if (this.shown.indexOf(place) < 0) this.toggleKind(this.all.categoryOf(place));
    const { slices, layout, viewport } = this;
    const index = this.shown.indexOf(place);
    if (layout.reveal(slices.rowOf(index))) this.arrange();
    viewport.bringIn(slices.begin[index], slices.end[index]);
    this.select(place);
  }

  /**
   * Scroll as little as needed to show a slice's row.
   * @param {number} index among visible slices
   */
  scrollTo(index) {
    const { scroller } = this.parts;
    const y = this.layout.yOf(this.slices.rowOf(index));
    if (y === undefined) return;
    const [highest, lowest] = [y - ROW, y + 2 * ROW - scroller.clientHeight];
    if (scroller.scrollTop > highest) scroller.scrollTop = highest;
    else if (scroller.scrollTop < lowest) scroller.scrollTop = lowest;
  }

  /**
   * @param {number} begin
   * @param {number} end
   */
  zoomTo(begin, end) {
    this.viewport.show(begin, end);
    this.changed();
  }

  /** @param {number} place index in the packed columns; -1 does nothing */
  zoomToSlice(place) {
    if (place < 0) return;
    this.viewport.showAround(this.all.begin[place], this.all.end[place]);
    this.jumpTo(place);
  }

  /** Show the selected slice and its launch, or the slice it launched, unless that is hidden. */
  zoomToLinked() {
    if (this.selected < 0) return;
    const linked = this.all.linkedTo(this.selected);
    const places = this.shown.indexOf(linked) < 0 ? [this.selected] : [linked, this.selected];
    this.viewport.showAround(...this.all.spanOf(places));
    for (const place of places) this.jumpTo(place);
  }

  showAll() {
    this.viewport.showAll();
    this.changed();
  }

  /** @param {[number, number] | null} range */
  setRange(range) {
    this.range = range;
    this.isRangeShown = false; // summed up once per frame, however fast the pointer is
    this.changed();
  }

  /** @param {string} text */
  setSearch(text) {
    this.search = text;
    this.setMarked(text);
    const more = this.shown.places && this.found.isActive ? new Found(this.all, text).count - this.found.count : 0;
    this.parts.message.textContent = more ? `${formatCount(more)} more in hidden categories.` : "";
  }

  /**
   * Mark a link's target; the search shows its label.
   * @param {Find} find
   */
  mark(find) {
    this.search = labelOf(find);
    this.parts.search.value = this.search;
    this.setMarked(find);
  }

  /** @param {string | Find} marked */
  setMarked(marked) {
    this.marked = marked;
    this.found = new Found(this.slices, marked);
    showFound(this);
    this.changed();
  }

  /**
   * @param {1 | -1} direction
   * @returns {boolean} whether there is one
   */
  nextFound(direction) {
    const index = this.found.next(this.at, direction, this.viewport.begin);
    if (index >= 0) this.jumpTo(this.shown.placeOf(index));
    return index >= 0;
  }

  /**
   * Index in the packed columns of the slice drawn under a point of the canvas, in CSS pixels; -1 without one.
   * @param {number} x
   * @param {number} y
   */
  sliceAt(x, y) {
    const placed = this.layout.rowAt(y + this.parts.scroller.scrollTop);
    if (!placed) return -1;
    // The exact screen pixel, and if it's empty its neighbors, because short slices are hard to hit.
    const ratio = this.parts.canvas.width / this.viewport.width;
    const perPixel = this.viewport.perPixel / ratio;
    const pixel = Math.floor(x * ratio);
    for (const offset of [0, 1, -1, 2, -2]) {
      const from = this.viewport.begin + (pixel + offset) * perPixel;
      const to = this.viewport.begin + (pixel + offset + 1) * perPixel;
      const index = this.slices.mostIn(placed.row, from, to);
      if (index >= 0) return this.shown.placeOf(index);
    }
    return -1;
  }

  destroy() {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    for (const end of this.ends) end();
    this.parts.root.remove();
  }
}

/** @param {unknown} range */
function isRange(range) {
  return Array.isArray(range) && range.length === 2 && range.every(Number.isFinite) && range[0] < range[1];
}

/**
 * Notify when a reader zooms the page or moves it to another screen.
 * @param {() => void} onChange
 */
function watchSharpness(onChange) {
  const ends = new AbortController();
  const watch = () => {
    const query = matchMedia(`(resolution: ${window.devicePixelRatio}dppx)`);
    query.addEventListener("change", () => {
      onChange();
      watch();
    }, { once: true, signal: ends.signal });
  };
  watch();
  return ends;
}
