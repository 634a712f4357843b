// How the times of the clean steps of a range are distributed, with p50, p90 and p99.

import { durationLabels, formatCount, formatDuration, tickLabels } from "../units.js";
import { make } from "../dom.js";
import { Plot } from "./plot.js";
import { histogram } from "./statistics.js";

/** @typedef {import("./palette.js").Palette} Palette */
/** @typedef {import("./statistics.js").Figures} Figures */
/** @typedef {import("./readout.js").Words} Words */

const HEIGHT = 210;
const LINE_HEIGHT = 14;

/** The histogram with its caption and a line that says what is under the pointer. */
export class Histogram {
  /**
   * @param {() => Palette} palette
   * @param {Words} words
   */
  constructor(palette, words) {
    this.palette = palette;
    this.words = words;
    /** @type {Figures | null} */
    this.figures = null;
    /** @type {import("./statistics.js").Bars | null} */
    this.bars = null;
    this.note = make("p", { class: "note" });
    this.host = make("div", { class: "steps-plot" });
    this.readout = make("p", { class: "steps-readout" });
    const title = make("h2", {}, `Clean ${words.step} times`);
    this.element = make("figure", { class: "steps-chart" }, title, this.note, this.host, this.readout);
  }

  /** Make the chart; the element must stand in the page. */
  mount() {
    this.plot = new Plot(this.host, {
      height: HEIGHT,
      palette: this.palette,
      curves: [{ color: () => "transparent", width: 0 }],
      xLabels: durationLabels,
      yLabels: (values) => tickLabels(values),
      before: (plot) => this.paint(plot),
      onCursor: (point) => this.look(point),
    });
  }

  /** @param {Figures} figures */
  draw(figures) {
    this.figures = figures;
    this.bars = histogram(figures.sorted);
    const { bars, words } = this;
    const beyond = bars?.beyond ?? 0;
    this.note.textContent = bars
      ? `Clean ${words.steps} in the range.${beyond ? ` ${formatCount(beyond)} slower ones past the right edge.` : ""}`
      : `No clean ${words.step} in this range.`;
    this.host.hidden = !bars;
    this.readout.hidden = !bars;
    if (!bars || !this.plot) return;
    const { low, width, counts } = bars;
    const centers = counts.map((_, bar) => low + (bar + 0.5) * width);
    const end = low + width * counts.length;
    this.plot.resize(); // it had no width while it was hidden
    this.plot.draw(centers, [counts.map(() => null)], [low, end], Math.max(...counts) * 1.25);
    this.look(null);
  }

  /** @param {Plot} plot */
  paint({ chart }) {
    const { bars, figures } = this;
    if (!bars || !figures) return;
    const { ctx, bbox } = chart;
    const colors = this.palette();
    const x = (/** @type {number} */ value) => Math.round(chart.valToPos(value, "x", true));
    ctx.save();
    ctx.fillStyle = colors.single;
    bars.counts.forEach((count, bar) => {
      const [left, right] = [bar, bar + 1].map((edge) => x(bars.low + edge * bars.width));
      const top = Math.round(chart.valToPos(count, "y", true));
      ctx.fillRect(left, top, Math.max(1, right - left - devicePixelRatio), bbox.top + bbox.height - top);
    });
    this.paintMarks(chart, colors, figures);
    ctx.restore();
  }

  /**
   * @param {uPlot} chart
   * @param {Palette} colors
   * @param {Figures} figures
   */
  paintMarks({ ctx, bbox, valToPos }, colors, figures) {
    const [right, ratio] = [bbox.left + bbox.width, devicePixelRatio];
    const marks = MARKS.map((name) => {
      const value = figures[name] ?? NaN;
      return { text: `${name} ${formatDuration(value)}`, x: Math.round(valToPos(value, "x", true)) };
    }).filter(({ x }) => x <= right + 1);
    ctx.strokeStyle = colors.text;
    ctx.lineWidth = ratio;
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    for (const { x } of marks) {
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.setLineDash([]);
    ctx.strokeStyle = colors.page; // around the texts, which may stand on a line
    ctx.lineWidth = 4 * ratio;
    ctx.lineJoin = "round";
    ctx.fillStyle = colors.text;
    ctx.font = `${12 * ratio}px ${getComputedStyle(this.host).fontFamily}`;
    ctx.textBaseline = "top";
    marks.forEach(({ text, x }, place) => {
      const pad = 4 * ratio;
      const isLeft = x + pad + ctx.measureText(text).width > right;
      ctx.textAlign = isLeft ? "right" : "left";
      const top = bbox.top + place * LINE_HEIGHT * ratio;
      ctx.strokeText(text, isLeft ? x - pad : x + pad, top);
      ctx.fillText(text, isLeft ? x - pad : x + pad, top);
    });
  }

  /** @param {number | null} bar */
  look(bar) {
    const { bars, figures } = this;
    if (!bars || !figures) return;
    if (bar === null || bar >= bars.counts.length) {
      const marks = MARKS.map((name) => `${name} ${formatDuration(figures[name])}`);
      this.readout.textContent = marks.join(", ");
      return;
    }
    const [from, to] = [bar, bar + 1].map((edge) => formatDuration(bars.low + edge * bars.width));
    this.readout.textContent = `${from} to ${to}: ${formatCount(bars.counts[bar])} ${this.words.steps}`;
  }
}

/** @type {("p50" | "p90" | "p99")[]} */
const MARKS = ["p50", "p90", "p99"];
