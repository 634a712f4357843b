// Details of a range's steps: figures, histogram and causes of a dragged range, and its slowest steps.

import { formatCount, formatDuration, formatRate, formatRatio } from "../format.js";
import { make } from "../dom.js";
import { histogramChart } from "./histogram.js";
import { causesOfSlowness, rangeFigures, slowestSteps } from "./statistics.js";
import { causesTable, slowestTable } from "./tables.js";

/** @typedef {import("./data.js").Steps} Steps */
/** @typedef {import("./readout.js").Words} Words */
/** @typedef {import("./statistics.js").Figures} Figures */

const MOST_ROWS = 20;
const FEW = 10;

/** Everything below a run's charts. */
export class RangePanel {
  /**
   * @param {Steps} steps
   * @param {Words} words
   * @param {(step: number) => void} onChoose
   * @param {import("./readout.js").Goto} goto
   */
  constructor(steps, words, onChoose, goto) {
    this.steps = steps;
    this.words = words;
    this.onChoose = onChoose;
    this.goto = goto;
    this.figures = make("dl", { class: "figures" });
    this.about = make("p", { class: "note" });
    this.pair = make("div", { class: "steps-pair" });
    this.slowest = make("section", { class: "table steps-slowest" });
    const parts = [this.figures, this.about, this.pair, this.slowest];
    this.element = make("div", { class: "steps-range", "aria-busy": "false" }, ...parts);
  }

  /**
   * @param {number} first
   * @param {number} last inclusive
   * @param {boolean} onlyClean whether the slowest steps must be clean
   */
  draw(first, last, onlyClean) {
    const figures = rangeFigures(this.steps, first, last);
    for (const part of [this.figures, this.about, this.pair]) part.replaceChildren();
    if (figures.steps !== this.steps.count) { // Python provides those of the whole run
      this.drawFigures(figures);
      this.pair.append(histogramChart(figures, this.words), this.causes(figures, first, last));
    }
    this.drawSlowest(figures, first, last, onlyClean);
  }

  /** @param {Figures} figures */
  drawFigures(figures) {
    const { words, steps } = this;
    const wanted = [
      [words.steps, formatCount(figures.steps)],
      ["clean", formatCount(figures.clean)],
      ["avg", formatDuration(figures.mean)],
      ["p50", formatDuration(figures.p50)],
      ["p99", formatDuration(figures.p99)],
      [`${words.steps}/s`, formatRate(figures.stepsPerS)],
      [`${words.samples}/s`, formatRate(figures.samplesPerS)],
      ["Reader Ratio", formatRatio(figures.readerRatio)],
    ];
    this.figures.replaceChildren(
      ...wanted.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, make("b", {}, text)))),
    );
    const few = figures.clean < FEW ? ` With fewer than ${FEW} clean ${words.steps}, they're unreliable.` : "";
    const unknown = figures.clean && figures.samplesPerS === null
      ? ` ${words.samples}/s is unknown because a clean ${words.step} has no ${words.samples} count.`
      : "";
    const net = steps.hasProfilerTime ? ", without profiler overhead" : "";
    this.about.textContent =
      `Figures are for clean ${words.steps} in the range, as in Perf Summary${net}.${few}${unknown}`;
  }

  /**
   * @param {Figures} figures
   * @param {number} first
   * @param {number} last
   */
  causes({ p90, clean }, first, last) {
    const { step, steps } = this.words;
    const causes = p90 === null ? null : causesOfSlowness(this.steps, first, last, p90);
    const [slow, others] = [causes?.slow ?? 0, causes?.others ?? 0].map(formatCount);
    const about = causes
      ? `Mean per phase over the ${slow} clean ${steps} above p90 (${formatDuration(p90)}) and over the other ${others}.`
      : clean ? `No clean ${step} took longer than p90.` : `No clean ${step} in this range.`;
    const title = make("h2", {}, `Time lost in the slowest 10% of ${steps}`);
    const parts = [title, make("p", { class: "note" }, about), ...(causes ? [causesTable(causes, this.words)] : [])];
    return make("section", { class: "table steps-causes" }, ...parts);
  }

  /**
   * @param {Figures} figures
   * @param {number} first
   * @param {number} last
   * @param {boolean} onlyClean
   */
  drawSlowest({ p50 }, first, last, onlyClean) {
    const { words } = this;
    const steps = onlyClean ? this.steps.net : this.steps;
    const slowest = slowestSteps(steps, first, last, MOST_ROWS, onlyClean);
    const title = make("h2", {}, `Slowest ${onlyClean ? "clean " : ""}${words.steps}`);
    const about = slowest.length
      ? `The ${slowest.length} slowest in the range; click one to zoom in. The median is over clean ${words.steps}.${this.profilerNote(onlyClean)}`
      : `No clean ${words.step} in this range.`;
    this.slowest.replaceChildren(title, make("p", { class: "note" }, about));
    if (slowest.length) this.slowest.append(slowestTable(steps, slowest, p50, words, this.onChoose, this.goto));
  }

  /** @param {boolean} onlyClean */
  profilerNote(onlyClean) {
    if (!this.steps.hasProfilerTime) return "";
    return onlyClean
      ? " Times exclude profiler overhead."
      : " Times include profiler overhead; the median excludes it.";
  }
}
