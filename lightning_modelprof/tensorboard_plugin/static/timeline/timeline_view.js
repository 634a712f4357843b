// The state of the timeline and what changes it. Drawing and input are in modules of their own.

import { Body } from "./body.js";
import { Found } from "./search.js";
import { HEAD, Head } from "./head.js";
import { Layout, ROW } from "./layout.js";
import { Palette } from "./colors.js";
import { Slices } from "./slices.js";
import { Viewport } from "./viewport.js";
import { fillLanes, fillLegend, makeParts } from "./parts.js";
import { fillToolbar, showFound } from "./toolbar.js";
import { formatCount } from "../units.js";
import { listen } from "./input.js";
import { showRange, showSelection, spoken } from "./panel.js";
import { showValues } from "./tooltip.js";

/** @typedef {{begin: number, end: number, selected: number, search: string, range: [number, number] | null}} State */
/** @typedef {{onChange?: (state: State) => void, initial?: Partial<State>, title?: string}} Options */

const LEFT = 190; // pixels for labels, as in timeline.css
const QUIET_MS = 200; // after the last change before it is told

export class TimelineView {
  /**
   * @param {HTMLElement} container
   * @param {import("../columns.js").Unpacked} unpacked
   * @param {Options} options
   */
  constructor(container, unpacked, { onChange = () => {}, initial = {}, title = "trace" }) {
    this.slices = new Slices(unpacked);
    this.title = title;
    this.onChange = onChange;
    this.viewport = new Viewport(this.slices.traceBegin, this.slices.traceEnd);
    this.layout = new Layout(this.slices);
    this.found = new Found(this.slices, "");
    this.search = "";
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
    this.palette = new Palette(this.parts.root, this.slices.categories, this.slices.names);
    fillLegend(this.parts, this.slices.categories, this.palette.bases);
    this.body = new Body(this);
    this.head = new Head(this);
    this.parts.about.textContent = `${formatCount(this.slices.count)} slices`;
    this.ends = [fillToolbar(this), listen(this)];
    this.arrange();
    this.watch();
    this.take(initial ?? {});
    showSelection(this, this.parts.selection);
    showRange(this, this.parts.range);
    showFound(this);
  }

  /**
   * Begin with what a link says, as far as it makes sense.
   * @param {Record<string, any>} state
   */
  take({ begin, end, selected, search, range }) {
    if (typeof search === "string") {
      this.parts.search.value = search;
      this.setSearch(search);
    }
    if (isRange(range)) this.setRange([range[0], range[1]]);
    if (Number.isInteger(selected) && selected >= 0 && selected < this.slices.count) this.select(selected);
    if (isRange([begin, end])) this.zoomTo(begin, end);
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
    this.ends.push(() => {
      resize.disconnect();
      sharpness.abort();
      document.removeEventListener("themechange", repaint);
      dark.removeEventListener("change", repaint);
    });
  }

  resize() {
    const { scroller, canvas, head, top } = this.parts;
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(1, scroller.clientWidth - LEFT);
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
    this.drawNow(); // a canvas of a new size is empty until it is drawn
  }

  /** Lanes were opened or closed. */
  arrange() {
    fillLanes(this.parts, this.layout, (item) => {
      this.layout.toggle(item);
      this.arrange();
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
    return { begin, end, selected: this.selected, search: this.search, range: this.range };
  }

  changed() {
    this.draw();
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.onChange(this.state()), QUIET_MS);
  }

  /**
   * @param {number} index -1 selects nothing
   * @param {boolean} [isSeen] whether the reader pointed at it: then nothing moves, and a second click meets it, too
   */
  select(index, isSeen = false) {
    this.selected = index;
    showSelection(this, this.parts.selection);
    showFound(this);
    this.parts.live.textContent = spoken(this);
    if (index >= 0 && !isSeen) this.scrollTo(index);
    this.changed();
  }

  /**
   * Select a slice and bring its time and row into view.
   * @param {number} index
   */
  jumpTo(index) {
    const { slices, layout, viewport } = this;
    if (layout.reveal(slices.rowOf(index))) this.arrange();
    viewport.bringIn(slices.begin[index], slices.end[index]);
    this.select(index);
  }

  /**
   * Scroll as little as is needed to see the row of a slice.
   * @param {number} index
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

  /** @param {number} index */
  zoomToSlice(index) {
    if (index < 0) return;
    this.viewport.showAround(this.slices.begin[index], this.slices.end[index]);
    this.jumpTo(index);
  }

  showAll() {
    this.viewport.showAll();
    this.changed();
  }

  /** @param {[number, number] | null} range */
  setRange(range) {
    this.range = range;
    this.isRangeShown = false; // summed up once a frame, however fast the pointer is
    this.changed();
  }

  /** @param {string} text */
  setSearch(text) {
    this.search = text;
    this.found = new Found(this.slices, text);
    showFound(this);
    this.changed();
  }

  /** @param {1 | -1} direction */
  nextFound(direction) {
    const index = this.found.next(this.selected, direction, this.viewport.begin);
    if (index >= 0) this.jumpTo(index);
  }

  /**
   * The slice drawn under a point of the canvas, in CSS pixels; -1 without one.
   * @param {number} x
   * @param {number} y
   */
  sliceAt(x, y) {
    const placed = this.layout.rowAt(y + this.parts.scroller.scrollTop);
    if (!placed) return -1;
    // The very pixel of the screen, and its neighbours where it is empty: short slices are hard to meet.
    const ratio = this.parts.canvas.width / this.viewport.width;
    const perPixel = this.viewport.perPixel / ratio;
    const pixel = Math.floor(x * ratio);
    for (const offset of [0, 1, -1, 2, -2]) {
      const from = this.viewport.begin + (pixel + offset) * perPixel;
      const to = this.viewport.begin + (pixel + offset + 1) * perPixel;
      const index = this.slices.mostIn(placed.row, from, to);
      if (index >= 0) return index;
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
 * Tell when a reader zooms the page or moves it to another screen.
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
