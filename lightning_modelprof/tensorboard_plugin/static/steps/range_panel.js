// What is said of the steps of a range: the figures of one that was dragged, and its slowest steps.

import { formatCount, formatDuration, formatRate, formatRatio } from "../format.js";
import { make } from "../dom.js";
import { rangeFigures, slowestSteps } from "./statistics.js";
import { slowestTable } from "./tables.js";

/** @typedef {import("./data.js").Steps} Steps */
/** @typedef {import("./readout.js").Words} Words */
/** @typedef {import("./statistics.js").Figures} Figures */

const MOST_ROWS = 20;
const FEW = 10;

/** Everything below the charts of a run. */
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
    this.slowest = make("section", { class: "table steps-slowest" });
    this.element = make("div", { class: "steps-range", "aria-busy": "false" }, this.figures, this.about, this.slowest);
  }

  /**
   * @param {number} first
   * @param {number} last inclusive
   * @param {boolean} onlyClean whether the slowest steps are clean ones
   */
  draw(first, last, onlyClean) {
    const figures = rangeFigures(this.steps, first, last);
    const isWhole = figures.steps === this.steps.count; // its figures come from Python
    this.figures.replaceChildren();
    this.about.textContent = "";
    if (!isWhole) this.drawFigures(figures);
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
