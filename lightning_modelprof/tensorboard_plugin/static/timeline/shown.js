// The visible part of a trace: all slices, or those left when some categories are hidden. Slices are identified by
// their index in the packed columns, except in drawing and searching, which use the index among visible slices.

import { Slices } from "./slices.js";

/** @typedef {import("../columns.js").Unpacked} Unpacked */
/** @typedef {import("./slices.js").Row} Row */

export class Shown {
  /**
   * @param {Unpacked} unpacked
   * @param {Set<string>} hidden categories
   */
  constructor(unpacked, hidden) {
    const isHidden = unpacked.meta.categories.map((/** @type {string} */ category) => hidden.has(category));
    const isWhole = !isHidden.includes(true);
    const { left, places } = isWhole ? { left: unpacked, places: null } : without(unpacked, isHidden);
    this.slices = new Slices(left);
    this.places = places;
    /** @type {Int32Array | null} */
    this.known = null;
    if (!places) return;
    this.known = new Int32Array(unpacked.columns.get("begin")?.length ?? 0).fill(-1);
    places.forEach((place, index) => (/** @type {Int32Array} */ (this.known)[place] = index));
  }

  /**
   * Index in the packed columns; -1 for none.
   * @param {number} index among visible slices
   */
  placeOf(index) {
    return index < 0 || !this.places ? index : this.places[index];
  }

  /**
   * Index among visible slices; -1 if hidden.
   * @param {number} place index in the packed columns
   */
  indexOf(place) {
    return place < 0 || !this.known ? place : this.known[place];
  }
}

/**
 * The columns without some categories. Slices inside hidden ones move up, right below what they overlap.
 * @param {Unpacked} unpacked
 * @param {boolean[]} isHidden by category
 * @returns {{left: Unpacked, places: Int32Array}} `places`: index of each remaining slice in the packed columns
 */
function without({ meta, columns }, isHidden) {
  const column = (/** @type {string} */ name) => /** @type {Float64Array} */ (columns.get(name));
  const [begin, duration, category] = ["begin", "duration", "category"].map(column);
  /** @type {Map<number, Int32Array[]>} lane → its rows */
  const lanes = new Map();
  let first = 0;
  for (const [lane, , count] of meta.rows) {
    const row = new Int32Array(count);
    let kept = 0;
    for (let place = first; place < first + count; place += 1) {
      if (!isHidden[category[place]]) row[kept++] = place;
    }
    if (kept) lanes.set(lane, [...(lanes.get(lane) ?? []), row.subarray(0, kept)]);
    first += count;
  }
  /** @type {[number, number, number][]} */
  const rows = [];
  /** @type {Int32Array[]} */
  const parts = [];
  for (const [lane, own] of lanes) {
    laid(inOrder(own, begin), begin, duration).forEach((row, depth) => {
      rows.push([lane, depth, row.length]);
      parts.push(row);
    });
  }
  const places = new Int32Array(parts.reduce((sum, { length }) => sum + length, 0));
  let next = 0;
  for (const part of parts) {
    places.set(part, next);
    next += part.length;
  }
  const index = new Int32Array(begin.length).fill(-1);
  for (let at = 0; at < places.length; at += 1) index[places[at]] = at;
  const found = new Map(columns);
  for (const name of ["begin", "duration", "name", "category", "detail", "launch"]) {
    const whole = column(name);
    const kept = new Float64Array(places.length);
    for (let at = 0; at < places.length; at += 1) kept[at] = whole[places[at]];
    found.set(name, kept);
  }
  const launch = /** @type {Float64Array} */ (found.get("launch"));
  for (let at = 0; at < launch.length; at += 1) if (launch[at] >= 0) launch[at] = index[launch[at]];
  return { left: { meta: { ...meta, rows }, columns: found }, places };
}

/**
 * Merges rows, by start; for equal starts, slices of the upper row come first.
 * @param {Int32Array[]} rows
 * @param {Float64Array} begin
 * @returns {Int32Array}
 */
function inOrder(rows, begin) {
  if (rows.length === 1) return rows[0];
  const middle = rows.length >> 1;
  const [upper, lower] = [inOrder(rows.slice(0, middle), begin), inOrder(rows.slice(middle), begin)];
  const merged = new Int32Array(upper.length + lower.length);
  for (let at = 0, above = 0, below = 0; at < merged.length; at += 1) {
    const isAbove = below === lower.length || (above < upper.length && begin[upper[above]] <= begin[lower[below]]);
    merged[at] = isAbove ? upper[above++] : lower[below++];
  }
  return merged;
}

/**
 * Lays out rows: each slice is below all that are open when it starts. Zero-length slices are inside what is open.
 * @param {Int32Array} order by start
 * @param {Float64Array} begin
 * @param {Float64Array} duration
 */
function laid(order, begin, duration) {
  /** @type {number[]} until when each depth is taken */
  const until = [];
  const depths = new Int32Array(order.length);
  let last = -1; // the deepest open one
  for (let at = 0; at < order.length; at += 1) {
    const place = order[at];
    while (last >= 0 && until[last] <= begin[place]) last -= 1;
    last += 1;
    until[last] = begin[place] + Math.max(1, duration[place]);
    depths[at] = last;
  }
  const counts = new Int32Array(until.length);
  for (const depth of depths) counts[depth] += 1;
  const rows = Array.from(counts, (count) => new Int32Array(count));
  counts.fill(0);
  for (let at = 0; at < order.length; at += 1) rows[depths[at]][counts[depths[at]]++] = order[at];
  return rows;
}
