// Draws a row of slices as one line of pixels. Its cost is bounded by the number of pixels or of slices in view,
// whichever is smaller: adjacent slices that share a pixel aren't read one by one.

import { firstAbove, firstFrom, firstWhere } from "../sorted.js";

/** @typedef {import("./slices.js").Slices} Slices */
/** @typedef {import("./slices.js").Row} Row */
/** @typedef {import("./colors.js").Palette} Palette */
/** @typedef {{begin: number, perPixel: number}} Scale of device pixels */

const WIDE = 4; // pixels; wider slices have an edge that separates them from adjacent ones

/**
 * Each pixel has the color of the slice that fills most of it, and is paler the less of it slices fill.
 * @param {Uint32Array} line the pixels; those without slices don't change
 * @param {Slices} slices
 * @param {Row} row
 * @param {Scale} scale
 * @param {Palette} palette
 * @param {Uint32Array} colors of the palette: normal or dimmed
 * @param {(index: number, x: number, stop: number) => void} onRun called for each slice that fills whole pixels
 */
export function drawRow(line, slices, row, { begin: origin, perPixel }, palette, colors, onRun) {
  const { begin, end, category, name } = slices;
  const width = line.length;
  let index = firstAbove(end, row.first, row.last, origin);
  for (let x = 0; x < width; ) {
    const from = origin + x * perPixel;
    const to = origin + (x + 1) * perPixel;
    index = firstAbove(end, index, row.last, from);
    if (index === row.last) return;
    if (begin[index] >= to) {
      x = Math.max(x + 1, Math.floor((begin[index] - origin) / perPixel));
    } else if (begin[index] <= from && end[index] >= to) {
      const stop = Math.min(width, Math.max(x + 1, Math.floor((end[index] - origin) / perPixel)));
      const color = palette.colorOf(category[index], name[index]);
      line.fill(colors[palette.pixelOf(color, 1)], x, stop);
      const touches = index > row.first && begin[index] > from - perPixel && end[index - 1] > from - perPixel;
      if (stop - x >= WIDE && touches) line[x] = colors[palette.pixelOf(color, 0)];
      onRun(index, x, stop);
      x = stop;
    } else {
      const last = firstFrom(begin, index, row.last, to);
      const most = slices.mostOf(index, last, from, to);
      const share = slices.busyIn(index, last, from, to) / perPixel;
      line[x] = colors[palette.pixelOf(palette.colorOf(category[most], name[most]), share)];
      x += 1;
    }
  }
}

/**
 * Slices that must be visible however short they are, such as search matches: at least one pixel.
 * @param {Uint32Array} line
 * @param {Slices} slices
 * @param {Int32Array} found indices of slices in one row, ascending
 * @param {Scale} scale
 * @param {Palette} palette
 * @param {(index: number, x: number, stop: number) => void} onRun called for each drawn slice
 */
export function drawFound(line, slices, found, { begin: origin, perPixel }, palette, onRun) {
  const { begin, end, category, name } = slices;
  const width = line.length;
  let place = firstWhere(0, found.length, (one) => end[found[one]] > origin);
  while (place < found.length) {
    const index = found[place];
    const x = Math.max(0, Math.floor((begin[index] - origin) / perPixel));
    if (x >= width) return;
    const stop = Math.min(width, Math.max(x + 1, Math.floor((end[index] - origin) / perPixel)));
    const color = palette.colorOf(category[index], name[index]);
    line.fill(palette.pixels[palette.pixelOf(color, 1)], x, stop);
    if (stop - x >= WIDE) line[x] = palette.pixels[palette.pixelOf(color, 0)];
    onRun(index, x, stop);
    const next = origin + stop * perPixel;
    place = firstWhere(place + 1, found.length, (one) => end[found[one]] > next);
  }
}

/**
 * A counter's highest value in each pixel, NaN before its first.
 * @param {import("./slices.js").Counter} counter
 * @param {number} width
 * @param {Scale} scale
 */
export function counterHeights({ times, values, highest }, width, { begin: origin, perPixel }) {
  const heights = new Float64Array(width).fill(NaN);
  let next = firstAbove(times, 0, times.length, origin); // the first value after the pixel's start
  for (let x = 0; x < width; x += 1) {
    const to = origin + (x + 1) * perPixel;
    const first = Math.max(0, next - 1); // the value at the pixel's start
    next = firstFrom(times, next, times.length, to);
    if (next > first) heights[x] = values[highest.largest(first, next)];
  }
  return heights;
}
