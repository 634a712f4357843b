// Slices by name.

import { firstFrom, firstWhere } from "../sorted.js";

/** @typedef {import("./slices.js").Slices} Slices */

export class Found {
  /**
   * Slices whose name holds every word, in whatever case.
   * @param {Slices} slices
   * @param {string} text
   */
  constructor(slices, text) {
    this.slices = slices;
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    this.isActive = words.length > 0;
    const isNamed = Uint8Array.from(slices.names, (name) => {
      const lower = name.toLowerCase();
      return Number(this.isActive && words.every((word) => lower.includes(word)));
    });
    this.count = 0;
    const buffer = new Int32Array(this.isActive ? slices.count : 0);
    /** @type {Map<import("./slices.js").Row, Int32Array>} row → places of its found slices, ascending */
    this.byRow = new Map();
    if (!this.isActive) return;
    for (const row of slices.rows) {
      const first = this.count;
      for (let index = row.first; index < row.last; index += 1) {
        if (isNamed[slices.name[index]]) buffer[this.count++] = index;
      }
      if (this.count > first) this.byRow.set(row, buffer.subarray(first, this.count));
    }
  }

  /**
   * The next one in order of time (of those that begin together, in order of the columns); goes round.
   * @param {number} index the slice to go on from, -1 for none
   * @param {1 | -1} direction
   * @param {number} time to go on from without a slice
   */
  next(index, direction, time) {
    const from = index >= 0 ? this.slices.begin[index] : time;
    const after = index >= 0 ? index : direction > 0 ? -1 : Infinity;
    return this.nearest(from, after, direction) ?? this.nearest(-direction * Infinity, NaN, direction) ?? -1;
  }

  /**
   * How many come before a found slice in order of time.
   * @param {number} index
   */
  placeOf(index) {
    let count = 0;
    for (const found of this.byRow.values()) count += this.before(found, this.slices.begin[index], index);
    return count;
  }

  /** @param {number} index */
  has(index) {
    const found = index < 0 ? undefined : this.byRow.get(this.slices.rowOf(index));
    return found !== undefined && found[firstFrom(found, 0, found.length, index)] === index;
  }

  /**
   * @param {number} time
   * @param {number} index
   * @param {1 | -1} direction
   */
  nearest(time, index, direction) {
    let best;
    for (const found of this.byRow.values()) {
      let place = this.before(found, time, index);
      if (direction < 0) place -= 1;
      else if (found[place] === index) place += 1;
      const other = found[place];
      if (other !== undefined && (best === undefined || this.order(other, best) * direction < 0)) best = other;
    }
    return best;
  }

  /**
   * How many of the found slices of a row come before a slice in order of time.
   * @param {Int32Array} found
   * @param {number} time
   * @param {number} index
   */
  before(found, time, index) {
    const { begin } = this.slices;
    return firstWhere(0, found.length, (place) => {
      const at = begin[found[place]];
      return !(at < time || (at === time && found[place] < index));
    });
  }

  /**
   * @param {number} index
   * @param {number} other
   */
  order(index, other) {
    return this.slices.begin[index] - this.slices.begin[other] || index - other;
  }
}
