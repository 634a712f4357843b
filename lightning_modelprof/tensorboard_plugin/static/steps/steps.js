// The view Steps: all steps of a run, with zoom.

import { StepCharts } from "./charts.js";
import { Steps } from "./data.js";
import { make } from "../dom.js";
import { Legend } from "./legend.js";
import { readPalette } from "./palette.js";
import { RangePanel } from "./range_panel.js";
import { describePoint, pickedStep } from "./readout.js";
import { Zoom } from "./zoom.js";

/** @typedef {import("./readout.js").Words} Words */

/**
 * @typedef {Object} State state in a link to this view
 * @property {[number, number] | null} range numbers of the first and last step; null for all
 * @property {boolean} clean whether only clean steps are shown
 * @property {string[]} hidden keys of the hidden layers
 */

/**
 * @typedef {Object} Options
 * @property {(state: State) => void} [onChange]
 * @property {Partial<State>} [initial] from a link
 * @property {Words} [words] for a step and its samples; an evaluation loop has batches
 * @property {import("./readout.js").Goto} [goto]
 */

const AROUND = 15; // steps shown on both sides of a clicked one
const PAUSE = 80; // ms without a change before the figures are updated

const PICK = "Click a bar to see the step and open its trace.";

const KEYS = "Arrow keys move the cursor; Shift+arrow keys pan; + and - zoom; Enter selects a bar; Escape shows all.";

/**
 * Show a run's steps.
 * @param {HTMLElement} container
 * @param {import("../columns.js").Unpacked} unpacked as packed by show/tensorboard/profile_blob.py
 * @param {Options} [options]
 * @returns {{destroy: () => void, state: () => State}}
 */
export function mountSteps(container, unpacked, options = {}) {
  const steps = new Steps(unpacked);
  const words = options.words ?? { step: "step", steps: "steps", samples: "samples" };
  if (!steps.count) {
    const text = `No ${words.step} finished, so there's nothing to show. Train for longer, or see the notes in Overview for why it ended.`;
    const empty = make("p", { class: "note steps-empty" }, text);
    container.append(empty);
    return { destroy: () => empty.remove(), state: () => ({ range: null, clean: false, hidden: [] }) };
  }
  const view = new StepsView(container, steps, words, options);
  return { destroy: () => view.destroy(), state: () => view.state() };
}

/**
 * The state from a link, which may be mistyped.
 * @param {any} initial
 * @returns {State}
 */
function readState(initial) {
  const { range, clean, hidden } = initial ?? {};
  const isRange = Array.isArray(range) && range.length === 2 && range.every(Number.isFinite);
  return {
    range: isRange ? /** @type {[number, number]} */ (range) : null,
    clean: clean === true,
    hidden: Array.isArray(hidden) ? hidden : [],
  };
}

class StepsView {
  /**
   * @param {HTMLElement} container
   * @param {Steps} steps
   * @param {Words} words
   * @param {Options} options
   */
  constructor(container, steps, words, { onChange, initial, goto = () => null }) {
    this.steps = steps;
    this.words = words;
    this.onChange = onChange;
    this.goto = goto;
    this.zoom = new Zoom(steps.count);
    const { range, clean, hidden } = readState(initial);
    if (range) this.zoom.set(steps.placeOf(range[0]), steps.placeOf(range[1]));
    /** @type {number | null} */
    this.cursor = null;
    const palette = () => this.palette;
    this.legend = new Legend(steps.layers, hidden, () => this.changed());
    this.charts = new StepCharts(steps, words, palette, {
      onCursor: (point) => this.look(point),
      onSelect: (first, last) => this.show(first, last),
      onReset: () => this.reset(),
    });
    this.panel = new RangePanel(steps, words, (step) => this.showStep(step), goto);
    this.clean = make("input", { type: "checkbox" });
    this.clean.checked = clean;
    this.all = make("button", { type: "button" }, `Show all ${words.steps}`);
    this.place = make("output");
    this.readout = make("p", { class: "steps-readout", "aria-live": "polite" });
    this.picked = make("p", { class: "steps-picked", role: "status" }, PICK);
    this.root = this.build();
    container.append(this.root);
    this.palette = this.readPalette();
    this.charts.mount();
    this.listen();
    this.draw();
  }

  /** @returns {import("./palette.js").Palette} */
  readPalette() {
    return readPalette(this.root, this.steps.layers.map(({ color }) => color));
  }

  build() {
    const { charts, words, steps, legend } = this;
    const label = `Phase times per ${words.step} and throughput. ${KEYS}`;
    this.field = make(
      "div",
      { class: "steps-field", tabindex: "0", role: "application", "aria-label": label },
      charts.stackHost,
      make("h2", {}, `Throughput (${charts.rateName})`),
      charts.rateNote,
      charts.rateHost,
    );
    const unmeasured = steps.phases.filter((phase) => !phase.isMeasured).map((phase) => phase.label);
    const notes = [...steps.notes];
    if (unmeasured.length) notes.push(`Not measured: ${unmeasured.join(", ")}.`);
    const rest = steps.layers.find((layer) => layer.key === "rest");
    if (rest) notes.push(`Other phases: ${rest.phases.map((phase) => steps.phases[phase].label).join(", ")}.`);
    return make(
      "div",
      { class: "steps" },
      make(
        "div",
        { class: "tools" },
        make("label", {}, this.clean, ` clean ${words.steps} only`),
        this.all,
        this.place,
        make("span", { class: "steps-keys" }, `Drag to zoom, double-click to reset. ${KEYS}`),
      ),
      make(
        "section",
        { class: "steps-chart" },
        make("h2", {}, `Phase times per ${words.step}`),
        charts.note,
        ...notes.map((note) => make("p", { class: "note" }, note)),
        legend.element,
        this.readout,
        this.picked,
        this.field,
      ),
      this.panel.element,
    );
  }

  listen() {
    this.clean.addEventListener("change", () => this.changed());
    this.all.addEventListener("click", () => {
      const isFocused = this.all === document.activeElement; // until it's disabled
      this.reset();
      if (isFocused) this.field?.focus({ preventScroll: true });
    });
    this.field?.addEventListener("keydown", (event) => this.press(event));
    this.field?.addEventListener("click", () => this.pick(this.cursor)); // not after a drag, which uPlot keeps
    this.repaint = () => {
      this.palette = this.readPalette();
      this.charts.repaint();
    };
    document.addEventListener("themechange", this.repaint);
    let width = this.root.clientWidth;
    this.observer = new ResizeObserver(() => {
      if (this.root.clientWidth === width || !this.root.clientWidth) return;
      width = this.root.clientWidth;
      this.charts.resize();
      this.draw();
    });
    this.observer.observe(this.root);
  }

  /** @param {KeyboardEvent} event */
  press(event) {
    const action = this.actionOf(event);
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  }

  /**
   * @param {KeyboardEvent} event
   * @returns {(() => void) | null}
   */
  actionOf({ key, shiftKey }) {
    const direction = key === "ArrowLeft" ? -1 : key === "ArrowRight" ? 1 : 0;
    if (direction) return shiftKey ? () => this.move(() => this.zoom.pan(direction / 4)) : () => this.moveCursor(direction);
    if (key === "Home") return () => this.moveCursor(-Infinity);
    if (key === "End") return () => this.moveCursor(Infinity);
    if (key === "+" || key === "=") return () => this.move(() => this.zoom.scale(0.5, this.center()));
    if (key === "-" || key === "_") return () => this.move(() => this.zoom.scale(2, this.center()));
    if (key === "Enter") return () => this.pick(this.cursor)?.focus();
    return key === "Escape" ? () => this.reset() : null;
  }

  /** The step that stays in place when the range grows or shrinks. */
  center() {
    const { points } = this.charts;
    if (this.cursor === null) return (this.zoom.first + this.zoom.last) / 2;
    return (points.start[this.cursor] + points.end[this.cursor] - 1) / 2;
  }

  /** @param {number} by */
  moveCursor(by) {
    const most = this.charts.points.count.length - 1;
    const from = this.cursor ?? (by > 0 ? -1 : most + 1);
    this.charts.setCursor(Math.max(0, Math.min(most, from + by)));
  }

  /** @param {number | null} point */
  look(point) {
    const { points } = this.charts;
    this.cursor = point === null || point >= points.count.length ? null : point;
    const at = this.cursor;
    const steps = this.clean.checked ? this.steps.net : this.steps; // as in the charts
    this.readout.textContent = at === null ? "" : describePoint(steps, points, at, this.words);
    this.legend.show(at === null ? null : points.layers.map((layer) => layer[at]));
  }

  /**
   * Show a bar's actions, which stay while the pointer moves to them.
   * @param {number | null} point
   * @returns {HTMLElement | null} the first control
   */
  pick(point) {
    if (point === null) return null;
    const choose = (/** @type {number} */ step) => this.showStep(step);
    const steps = this.clean.checked ? this.steps.net : this.steps;
    this.picked.replaceChildren(...pickedStep(steps, this.charts.points, point, this.words, choose, this.goto));
    return this.picked.querySelector("button");
  }

  /**
   * Zoom to one step and stay at it.
   * @param {number} step
   */
  showStep(step) {
    this.zoom.set(step - AROUND, step + AROUND);
    this.changed();
    const point = Math.floor((step - this.zoom.first) / this.charts.points.size);
    queueMicrotask(() => this.charts.setCursor(point)); // uPlot sets its scales in its own microtask
    this.field?.focus({ preventScroll: true });
    this.root.scrollIntoView({ block: "start" });
  }

  /**
   * @param {number} first
   * @param {number} last
   */
  show(first, last) {
    this.move(() => this.zoom.set(Math.max(0, first), Math.min(this.steps.count - 1, last)));
  }

  reset() {
    this.move(() => this.zoom.reset());
  }

  /**
   * Change the range; the cursor stays at its step.
   * @param {() => void} change
   */
  move(change) {
    const step = this.cursor === null ? null : Math.floor(this.center());
    change();
    this.changed();
    if (step === null) return;
    const { first, last } = this.zoom;
    const isSeen = step >= first && step <= last;
    const point = isSeen ? Math.floor((step - first) / this.charts.points.size) : null;
    queueMicrotask(() => this.charts.setCursor(point));
  }

  changed() {
    this.draw();
    this.onChange?.(this.state());
  }

  /** Draw the charts now, and update the figures after a moment without changes. */
  draw() {
    const { zoom, steps } = this;
    this.charts.draw(zoom, this.legend.shown(), this.clean.checked);
    this.all.disabled = zoom.isWhole;
    this.place.value = `${this.words.steps} ${steps.number[zoom.first]} to ${steps.number[zoom.last]}`;
    this.panel.element.setAttribute("aria-busy", "true");
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.panel.draw(zoom.first, zoom.last, this.clean.checked);
      this.panel.element.setAttribute("aria-busy", "false");
    }, PAUSE);
  }

  /** @returns {State} */
  state() {
    const { zoom, steps } = this;
    return {
      range: zoom.isWhole ? null : [steps.number[zoom.first], steps.number[zoom.last]],
      clean: this.clean.checked,
      hidden: Array.from(this.legend.hidden),
    };
  }

  destroy() {
    clearTimeout(this.timer);
    if (this.repaint) document.removeEventListener("themechange", this.repaint);
    this.observer?.disconnect();
    this.charts.destroy();
    this.root.remove();
  }
}
