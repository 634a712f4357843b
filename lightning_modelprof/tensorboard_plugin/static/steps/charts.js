// The two charts over the steps, phases and throughput, with a common cursor and range.

import { durationLabels, formatCount, formatDuration, formatRate, tickLabels } from "../format.js";
import { axisTop, joinSteps } from "./bins.js";
import { make } from "../dom.js";
import { Plot } from "./plot.js";
import { paintStack, stackHeights } from "./stack.js";

/** @typedef {import("./bins.js").Points} Points */
/** @typedef {import("./data.js").Steps} Steps */
/** @typedef {import("./palette.js").Palette} Palette */
/** @typedef {import("./readout.js").Words} Words */
/** @typedef {import("./zoom.js").Zoom} Zoom */

const STACK_HEIGHT = 300;
const RATE_HEIGHT = 150;

/**
 * @typedef {Object} Listeners
 * @property {(point: number | null) => void} onCursor
 * @property {(first: number, last: number) => void} onSelect
 * @property {() => void} onReset
 */

/** Both charts. `points` is what they show. */
export class StepCharts {
  /**
   * @param {Steps} steps
   * @param {Words} words
   * @param {() => Palette} palette
   * @param {Listeners} listeners
   */
  constructor(steps, words, palette, listeners) {
    this.steps = steps;
    this.words = words;
    this.palette = palette;
    this.listeners = listeners;
    // A place on the x axis is a step number, unless numbers are missing.
    this.origin = steps.hasConsecutiveNumbers ? steps.number[0] : 0;
    /** @type {Points} */
    this.points = joinSteps(steps, 0, 0, 1, false);
    /** @type {number[]} */
    this.shown = [];
    this.stackHost = make("div", { class: "steps-plot" });
    this.rateHost = make("div", { class: "steps-plot" });
    this.note = make("p", { class: "note" });
    this.rateNote = make("p", { class: "note" });
    this.rateName = `${steps.hasSamples ? words.samples : words.steps}/s`;
  }

  /** Build the charts; their hosts must be in the page. */
  mount() {
    const shared = {
      palette: this.palette,
      xLabels: (/** @type {number[]} */ values) => this.numbers(values),
      onSelect: (/** @type {number} */ from, /** @type {number} */ to) =>
        this.listeners.onSelect(Math.round(from - this.origin), Math.round(to - this.origin)),
      onReset: this.listeners.onReset,
    };
    const follow = (/** @type {number | null} */ point, /** @type {Plot} */ plot) => {
      const other = plot === this.rate ? this.stack : this.rate;
      other?.setCursor(point === null ? null : this.center(point), true);
      this.listeners.onCursor(point);
    };
    this.stack = new Plot(this.stackHost, {
      ...shared,
      height: STACK_HEIGHT,
      curves: [{ color: (palette) => palette.text, width: 1 }],
      yLabels: durationLabels,
      before: (plot) => this.paint(plot),
      onCursor: follow,
    });
    this.rate = new Plot(this.rateHost, {
      ...shared,
      height: RATE_HEIGHT,
      curves: [{ color: (palette) => palette.single, width: 1.5 }],
      yLabels: (values) => tickLabels(values),
      onCursor: follow,
    });
  }

  /**
   * @param {Zoom} zoom
   * @param {number[]} shown indices of the layers
   * @param {boolean} onlyClean
   */
  draw(zoom, shown, onlyClean) {
    if (!this.stack || !this.rate) return;
    const most = Math.max(1, this.stack.innerWidth);
    const points = joinSteps(this.steps, zoom.first, zoom.last, most, onlyClean);
    this.points = points;
    this.shown = shown;
    const isJoined = points.size > 1;
    const heights = stackHeights(points, shown.map((layer) => points.layers[layer]));
    // The longest step is over all phases, so it only matters for the full stack.
    const hasPeaks = isJoined && shown.length === this.steps.layers.length;
    const peaks = hasPeaks ? points.longest : heights;
    const top = axisTop(heights, peaks);
    const centers = Array.from(points.count, (_, point) => this.center(point));
    /** @type {[number, number]} */
    const range = [this.origin + zoom.first - 0.5, this.origin + zoom.last + 0.5];
    this.stack.draw(centers, [hasPeaks ? withGaps(peaks) : centers.map(() => null)], range, top);
    const usual = points.rate.filter((rate) => rate > 0);
    const rateTop = axisTop(usual, usual);
    this.rate.draw(centers, [withGaps(points.rate)], range, rateTop);
    this.rateNote.textContent = beyond(usual, rateTop, formatRate);
    this.describe(points, peaks, top, hasPeaks, onlyClean);
  }

  /**
   * @param {Points} points
   * @param {Float64Array} peaks
   * @param {number} top
   * @param {boolean} hasPeaks
   * @param {boolean} onlyClean
   */
  describe({ size, leftOut }, peaks, top, hasPeaks, onlyClean) {
    const { words } = this;
    const clean = onlyClean ? "clean " : "";
    const parts = [
      size === 1
        ? `One bar per ${words.step}.`
        : `Each bar is the mean of ${formatCount(size)} ${this.steps.hasConsecutiveNumbers ? "neighboring" : "saved"} ${words.steps}${onlyClean ? " (clean ones only)" : ""}.`,
    ];
    if (hasPeaks) parts.push(`The thin line is the slowest ${clean}${words.step} in each bar.`);
    parts.push(beyond(peaks, top, formatDuration));
    if (leftOut.some((share) => share > 0)) parts.push(`Pale, shaded ${words.steps} are excluded.`);
    if (this.steps.hasProfilerTime) {
      parts.push(
        onlyClean
          ? "Charts exclude profiler overhead."
          : `Charts include profiler overhead; clean-${words.step} figures exclude it.`,
      );
    }
    this.note.textContent = parts.filter(Boolean).join(" ");
  }

  /** @param {Plot} plot */
  paint(plot) {
    const palette = this.palette();
    paintStack(plot, {
      points: this.points,
      center: this.points.count.map((_, point) => this.center(point)),
      layers: this.shown.map((layer) => this.points.layers[layer]),
      colors: this.shown.map((layer) => palette.layers[layer]),
      page: palette.page,
      shade: palette.dim,
    });
  }

  /**
   * Where a point's middle is on the x axis.
   * @param {number} point
   */
  center(point) {
    return this.origin + (this.points.start[point] + this.points.end[point] - 1) / 2;
  }

  /** @param {number[]} places */
  numbers(places) {
    const { number, count } = this.steps;
    const isStep = (/** @type {number} */ step) => Number.isInteger(step) && step >= 0 && step < count;
    return places.map((place) => (isStep(place - this.origin) ? String(number[place - this.origin]) : ""));
  }

  /** @param {number | null} point */
  setCursor(point) {
    this.stack?.setCursor(point === null ? null : this.center(point));
  }

  resize() {
    this.stack?.resize();
    this.rate?.resize();
  }

  repaint() {
    this.stack?.repaint();
    this.rate?.repaint();
  }

  destroy() {
    this.stack?.destroy();
    this.rate?.destroy();
  }
}

/**
 * NaN is a gap.
 * @param {Float64Array} values
 * @returns {(number | null)[]}
 */
function withGaps(values) {
  return Array.from(values, (value) => (Number.isNaN(value) ? null : value));
}

/**
 * A sentence about values beyond the axis; "" if there are none.
 * @param {Float64Array} values
 * @param {number} top
 * @param {(value: number) => string} write
 */
function beyond(values, top, write) {
  const cut = values.filter((value) => value > top).sort();
  if (!cut.length) return "";
  const most = write(cut[cut.length - 1]);
  if (cut.length === 1) return `One value is above the chart: ${most}.`;
  return `${formatCount(cut.length)} values are above the chart; the largest is ${most}.`;
}
