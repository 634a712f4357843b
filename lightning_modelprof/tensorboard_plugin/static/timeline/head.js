// Draws the area above the lanes: the whole trace with the visible part, the time axis, the steps.

import { FONT } from "./slice_names.js";
import { axisOf } from "./axis.js";
import { drawRow } from "./raster.js";

/** @typedef {import("./timeline_view.js").TimelineView} TimelineView */

export const MAP = 36; // CSS pixels of height
export const AXIS = 20;
const STEPS = 20;
export const HEAD = MAP + AXIS + STEPS;
const LEAST_WINDOW = 3;

export class Head {
  /** @param {TimelineView} view */
  constructor(view) {
    this.view = view;
    this.canvas = view.parts.head;
    this.context = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d", { alpha: false }));
    this.map = document.createElement("canvas");
  }

  /** The whole trace, which changes only with a new size or theme. */
  drawMap() {
    const { slices, palette, viewport } = this.view;
    const { width } = this.canvas;
    const height = Math.round((MAP * width) / viewport.width);
    if (!width || !height) return;
    Object.assign(this.map, { width, height });
    const image = new ImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer).fill(palette.raised);
    const scale = { begin: viewport.first, perPixel: (viewport.last - viewport.first) / width };
    const lanes = slices.lanes.filter(({ rows }) => rows[0]);
    lanes.forEach(({ rows }, place) => {
      const top = Math.round(2 + (place * (height - 4)) / lanes.length);
      const bottom = Math.max(top + 1, Math.round(2 + ((place + 1) * (height - 4)) / lanes.length) - 1);
      const line = new Uint32Array(width).fill(palette.raised);
      drawRow(line, slices, rows[0], scale, palette, palette.pixels, () => {});
      for (let y = top; y < bottom; y += 1) pixels.set(line, y * width);
    });
    /** @type {CanvasRenderingContext2D} */ (this.map.getContext("2d")).putImageData(image, 0, 0);
  }

  draw() {
    const { context, view, canvas } = this;
    const { viewport, palette } = view;
    const { width } = viewport;
    if (!canvas.width) return;
    context.setTransform(canvas.width / width, 0, 0, canvas.width / width, 0, 0);
    context.fillStyle = palette.css.page;
    context.fillRect(0, 0, width, HEAD);
    if (this.map.width) context.drawImage(this.map, 0, 0, width, MAP);
    this.window();
    context.font = FONT;
    context.textBaseline = "middle";
    this.axis();
    this.steps();
    this.range();
  }

  window() {
    const { context } = this;
    const { viewport, palette } = this.view;
    const perPixel = (viewport.last - viewport.first) / viewport.width;
    const from = Math.max(0, (viewport.begin - viewport.first) / perPixel);
    const to = Math.max(from + LEAST_WINDOW, Math.min(viewport.width, (viewport.end - viewport.first) / perPixel));
    context.globalAlpha = 0.65;
    context.fillStyle = palette.css.page;
    context.fillRect(0, 0, from, MAP);
    context.fillRect(to, 0, viewport.width - to, MAP);
    context.globalAlpha = 1;
    context.strokeStyle = palette.css.dim;
    context.lineWidth = 1;
    context.strokeRect(from + 0.5, 0.5, to - from - 1, MAP - 1);
  }

  axis() {
    const { context } = this;
    const { viewport, palette, parts } = this.view;
    const { base, marks } = axisOf(viewport);
    parts.base.textContent = base && `${base} +`;
    context.textAlign = "left";
    for (const { time, label } of marks) {
      const x = viewport.xOf(time);
      context.fillStyle = palette.css.line;
      context.fillRect(x, MAP + 3, 1, AXIS - 3);
      context.fillStyle = palette.css.dim;
      if (x + 4 + context.measureText(label).width > viewport.width) continue; // it would be cut
      context.fillText(label, x + 4, MAP + AXIS / 2 + 1);
    }
  }

  steps() {
    const { context } = this;
    const { slices, viewport, palette } = this.view;
    context.textAlign = "center";
    slices.steps.forEach(({ number, begin, end }, place) => {
      const from = Math.max(0, viewport.xOf(begin));
      const to = Math.min(viewport.width, viewport.xOf(end));
      if (to - from < 1) return;
      context.fillStyle = place % 2 ? palette.css.bar : palette.css.raised;
      context.fillRect(from, MAP + AXIS, to - from - 0.5, STEPS - 2);
      context.fillStyle = palette.css.text;
      const text = [`Step ${number}`, String(number)].find((one) => context.measureText(one).width < to - from - 6);
      if (text) context.fillText(text, (from + to) / 2, MAP + AXIS + STEPS / 2 - 0.5);
    });
  }

  range() {
    const { context } = this;
    const { viewport, palette, range } = this.view;
    if (!range) return;
    const [from, to] = range.map((time) => viewport.xOf(time));
    context.fillStyle = palette.css.link;
    context.globalAlpha = 0.2;
    context.fillRect(from, MAP, to - from, AXIS + STEPS);
    context.globalAlpha = 1;
  }
}
