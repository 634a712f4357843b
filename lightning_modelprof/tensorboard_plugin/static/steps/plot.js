// One uPlot chart: its axes, its cursor, and a range selected by dragging.

import uPlot from "../vendor/uplot/uPlot.esm.js";

/** @typedef {import("./palette.js").Palette} Palette */

/**
 * @typedef {Object} PlotOptions
 * @property {number} height in CSS pixels
 * @property {() => Palette} palette
 * @property {{color: (palette: Palette) => string, width: number}[]} curves
 * @property {(values: number[]) => string[]} xLabels of whole numbers
 * @property {(values: number[]) => string[]} yLabels
 * @property {(plot: Plot) => void} [before] draws the background of the curves
 * @property {(point: number | null, plot: Plot) => void} onCursor
 * @property {(from: number, to: number) => void} onSelect a dragged range of x
 * @property {() => void} onReset a double click
 */

const AXIS_WIDTH = 62;
const RIGHT = 12;
const LEAST_DRAG = 4; // pixels; less is a click

/** A chart with given scales and a cursor that can be set from outside. */
export class Plot {
  /**
   * @param {HTMLElement} host
   * @param {PlotOptions} options
   */
  constructor(host, options) {
    this.host = host;
    this.options = options;
    /** @type {[number, number]} */
    this.xRange = [0, 1];
    this.yTop = 1;
    this.chart = new uPlot(this.describe(), [[0], ...options.curves.map(() => [null])], host);
  }

  /** @returns {uPlot.Options} */
  describe() {
    const { options } = this;
    const palette = options.palette;
    const axis = {
      stroke: () => palette().dim,
      font: `12px ${getComputedStyle(this.host).fontFamily}`,
      ticks: { stroke: () => palette().line, width: 1, size: 5 },
      grid: { stroke: () => palette().line, width: 1 },
    };
    const write = (/** @type {(values: number[]) => string[]} */ labels) => (
      /** @type {uPlot} */ _chart,
      /** @type {number[]} */ values,
    ) => labels(values);
    return {
      width: Math.max(this.host.clientWidth, 1),
      height: options.height,
      padding: [8, RIGHT, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        points: { show: false },
        drag: { x: true, y: false, setScale: false },
        bind: {
          dblclick: () => () => {
            options.onReset();
            return null;
          },
        },
      },
      scales: {
        x: { time: false, range: () => this.xRange },
        y: { range: () => [0, this.yTop] },
      },
      axes: [
        {
          ...axis,
          grid: { show: false },
          size: 30,
          space: 70,
          values: write(options.xLabels),
          incrs: WHOLE_STEPS,
        },
        { ...axis, size: AXIS_WIDTH, values: write(options.yLabels) },
      ],
      series: [
        {},
        ...options.curves.map(({ color, width }) => ({
          stroke: () => color(palette()),
          width,
          points: { show: false },
        })),
      ],
      hooks: {
        drawAxes: [() => options.before?.(this)],
        setCursor: [() => options.onCursor(this.point(), this)],
        setSelect: [() => this.selected()],
      },
    };
  }

  /** The point at the cursor. */
  point() {
    const { left, idx } = this.chart.cursor;
    return left === undefined || left < 0 ? null : (idx ?? null);
  }

  selected() {
    const { left, width } = this.chart.select;
    if (!width) return;
    const [from, to] = [left, left + width].map((place) => this.chart.posToVal(place, "x"));
    this.chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (width >= LEAST_DRAG) this.options.onSelect(from, to);
  }

  /**
   * @param {ArrayLike<number>} x ascending
   * @param {(number | null)[][]} curves
   * @param {[number, number]} xRange
   * @param {number} yTop
   */
  draw(x, curves, xRange, yTop) {
    this.xRange = xRange;
    this.yTop = yTop;
    this.chart.setData([Array.from(x), ...curves]);
  }

  resize() {
    const width = this.host.clientWidth;
    if (width && width !== this.chart.width) this.chart.setSize({ width, height: this.options.height });
  }

  /** Draw again, in other colors. */
  repaint() {
    this.chart.redraw(true, true);
  }

  /** Width of the plotting area, in CSS pixels. */
  get innerWidth() {
    return this.chart.width - AXIS_WIDTH - RIGHT;
  }

  /**
   * Move the cursor to a place on the x axis, or hide it.
   * @param {number | null} x
   * @param {boolean} [isQuiet] whether to skip onCursor
   */
  setCursor(x, isQuiet = false) {
    const left = x === null ? -10 : this.chart.valToPos(x, "x");
    this.chart.setCursor({ left, top: x === null ? -10 : 1 }, !isQuiet);
  }

  destroy() {
    this.chart.destroy();
  }
}

const WHOLE_STEPS = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
