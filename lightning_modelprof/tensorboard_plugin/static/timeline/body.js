// Draws the lanes: rows of slices, counters, the selection.

import { LEAST_WIDTH, FONT, SliceNames } from "./slice_names.js";
import { counterHeights, drawFound, drawRow } from "./raster.js";
import { ROW, SLICE } from "./layout.js";

/** @typedef {import("./timeline_view.js").TimelineView} TimelineView */

/** @typedef {{name: number, color: number, x: number, stop: number, y: number}} Label `x`, `stop`: in device pixels */

const COUNTER_PAD = 6;

export class Body {
  /** @param {TimelineView} view */
  constructor(view) {
    this.view = view;
    this.canvas = view.parts.canvas;
    this.context = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d", { alpha: false }));
    this.names = new SliceNames(view.slices.names);
    this.image = new ImageData(1, 1);
    this.pixels = new Uint32Array(1);
  }

  draw() {
    const { view, canvas, context } = this;
    const { width, height } = canvas;
    if (!width || !height) return;
    if (this.image.width !== width || this.image.height !== height) {
      this.image = new ImageData(width, height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    const ratio = width / view.viewport.width;
    const scale = { begin: view.viewport.begin, perPixel: (view.viewport.end - view.viewport.begin) / width };
    const ground = this.ground(scale);
    for (let y = 0; y < height; y += 1) this.pixels.set(ground, y * width);
    const labels = this.rows(scale, ratio, ground);
    for (const item of view.layout.items) {
      if (item.kind === "counter" && this.isSeen(item.y, item.height)) this.counter(item, scale, ratio);
    }
    context.putImageData(this.image, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.translate(0, -view.scrollTop);
    this.lines();
    this.writeNames(labels, ratio);
    this.range();
    this.selection();
    context.setTransform(1, 0, 0, 1, 0, 0);
  }

  /**
   * @param {number} y
   * @param {number} height
   */
  isSeen(y, height) {
    return y + height > this.view.scrollTop && y < this.view.scrollTop + this.view.height;
  }

  /**
   * One line of pixels of the background: every other step has a tint.
   * @param {import("./raster.js").Scale} scale
   */
  ground(scale) {
    const { palette, slices } = this.view;
    const line = new Uint32Array(this.canvas.width).fill(palette.page);
    slices.steps.forEach((step, place) => {
      const from = Math.max(0, Math.round((step.begin - scale.begin) / scale.perPixel));
      const to = Math.max(0, Math.round((step.end - scale.begin) / scale.perPixel));
      if (place % 2) line.fill(palette.raised, from, to);
    });
    return line;
  }

  /**
   * @param {import("./raster.js").Scale} scale
   * @param {number} ratio device pixels per CSS pixel
   * @param {Uint32Array} ground
   * @returns {Label[]} of slices with room for a name
   */
  rows(scale, ratio, ground) {
    const { slices, layout, palette, found } = this.view;
    const line = new Uint32Array(ground.length);
    /** @type {Label[]} */
    const labels = [];
    for (const { row, y } of layout.rows) {
      if (!this.isSeen(y, ROW)) continue;
      /**
       * @param {number} index
       * @param {number} x
       * @param {number} stop
       */
      const onRun = (index, x, stop) => {
        if (stop - x < LEAST_WIDTH * ratio) return;
        const name = slices.name[index];
        labels.push({ name, color: palette.colorOf(slices.category[index], name), x, stop, y });
      };
      line.set(ground);
      drawRow(line, slices, row, scale, palette, found.isActive ? palette.dimmed : palette.pixels,
        found.isActive ? () => {} : onRun);
      const hits = found.byRow.get(row);
      if (hits) drawFound(line, slices, hits, scale, palette, onRun);
      const top = Math.round((y - this.view.scrollTop) * ratio);
      const bottom = Math.min(this.canvas.height, top + Math.round(SLICE * ratio));
      for (let at = Math.max(0, top); at < bottom; at += 1) this.pixels.set(line, at * line.length);
    }
    return labels;
  }

  /**
   * @param {import("./layout.js").Item} item
   * @param {import("./raster.js").Scale} scale
   * @param {number} ratio
   */
  counter(item, scale, ratio) {
    const { slices, palette, scrollTop } = this.view;
    const counter = slices.counters[item.place];
    const { width } = this.canvas;
    const heights = counterHeights(counter, width, scale);
    const room = (item.height - 2 * COUNTER_PAD) * ratio;
    const perValue = room / (counter.most - counter.least || 1);
    const zero = Math.round((item.y + COUNTER_PAD - scrollTop) * ratio + counter.most * perValue);
    const thick = Math.max(1, Math.round(1.5 * ratio));
    for (let x = 0; x < width; x += 1) {
      if (!heights[x]) continue; // 0 or unknown
      const at = zero - Math.round(heights[x] * perValue);
      this.fill(x, Math.min(at, zero), Math.max(at, zero), palette.counterArea);
      const top = heights[x] > 0 ? Math.min(at, zero - thick) : at; // so that the smallest is visible, too
      this.fill(x, top, top + thick, palette.counterLine);
    }
  }

  /**
   * @param {number} x
   * @param {number} from
   * @param {number} to
   * @param {number} color
   */
  fill(x, from, to, color) {
    const { width, height } = this.canvas;
    for (let y = Math.max(0, from); y < Math.min(height, to); y += 1) this.pixels[y * width + x] = color;
  }

  lines() {
    const { context, view } = this;
    context.fillStyle = view.palette.css.line;
    for (const item of view.layout.items) {
      if (!this.isSeen(item.y, item.height)) continue;
      context.fillRect(0, item.y + (item.kind === "group" ? item.height - 1 : item.height - 3), view.viewport.width,
        item.kind === "group" ? 1 : 0.5);
    }
  }

  /**
   * @param {Label[]} labels
   * @param {number} ratio
   */
  writeNames(labels, ratio) {
    const { context, view } = this;
    context.font = FONT;
    context.textBaseline = "middle";
    context.textAlign = "left";
    for (const color of ["#000", "#fff"]) {
      context.fillStyle = color; // set twice instead of once per name, which would be slower
      for (const label of labels) {
        if (view.palette.texts[label.color] !== color) continue;
        this.names.draw(context, label.name, label.x / ratio, label.stop / ratio, label.y + SLICE / 2 + 0.5);
      }
    }
  }

  range() {
    const { context, view } = this;
    if (!view.range) return;
    const from = view.viewport.xOf(view.range[0]);
    const to = view.viewport.xOf(view.range[1]);
    context.fillStyle = view.palette.css.link;
    context.globalAlpha = 0.12;
    context.fillRect(from, view.scrollTop, to - from, view.height);
    context.globalAlpha = 1;
    context.fillRect(from - 0.5, view.scrollTop, 1, view.height);
    context.fillRect(to - 0.5, view.scrollTop, 1, view.height);
  }

  /** An outline, and arrows from its launch and to what it launches; from a batch's end to its fetch's end. */
  selection() {
    const { slices, at: selected, palette } = this.view;
    if (selected < 0) return;
    const { context } = this;
    context.strokeStyle = palette.css.text;
    const launcher = slices.launch[selected] ?? -1;
    if (launcher >= 0) this.arrow(launcher, selected);
    for (const device of slices.launchesOf(selected).slice(0, 50)) this.arrow(selected, device);
    const box = this.boxOf(selected);
    if (!box) return;
    context.lineWidth = 2;
    context.strokeRect(box.x + 1, box.y + 1, Math.max(1, box.width - 2), SLICE - 2);
  }

  /**
   * @param {number} index
   */
  boxOf(index) {
    const { slices, viewport, layout } = this.view;
    const y = layout.yOf(slices.rowOf(index));
    if (y === undefined) return undefined;
    const limit = viewport.width + 10;
    const x = Math.min(limit, Math.max(-10, viewport.xOf(slices.begin[index])));
    const stop = Math.min(limit, Math.max(-10, viewport.xOf(slices.end[index])));
    return { x, y, width: Math.max(3, stop - x) };
  }

  /**
   * @param {number} host
   * @param {number} device
   */
  arrow(host, device) {
    const { context, view } = this;
    const [from, to] = [this.boxOf(host), this.boxOf(device)];
    if (!from || !to) return;
    const isBatch = view.slices.isBatch[view.slices.category[host]];
    const [x0, y0] = [from.x + (isBatch ? from.width : Math.min(from.width, 6) / 2), from.y + SLICE / 2];
    const [x1, y1] = [isBatch ? to.x + to.width : to.x, to.y + SLICE / 2];
    const bend = Math.max(20, Math.abs(x1 - x0) / 2);
    context.lineWidth = 1.5;
    context.strokeStyle = context.fillStyle = view.palette.css.text;
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - 4, y1);
    context.stroke();
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x1 - 7, y1 - 4);
    context.lineTo(x1 - 7, y1 + 4);
    context.fill();
  }
}
