// Slices by name.

import { firstFrom, firstWhere } from "../sorted.js";

/** @typedef {import("./slices.js").Slices} Slices */

/** @typedef {import("./find.js").Find} Find */

export class Found {
  /**
   * Slices whose names contain every word of a text, ignoring case, or those that a link points at.
   * @param {Slices} slices
   * @param {string | Find} wanted
   */
  constructor(slices, wanted) {
    this.slices = slices;
    const words = typeof wanted === "string" ? wanted.toLowerCase().split(/\s+/).filter(Boolean) : [];
    const { name, kind, rank } = typeof wanted === "string" ? /** @type {Find} */ ({}) : wanted;
    this.isActive = words.length > 0 || name !== undefined || kind !== undefined;
    const isNamed = Uint8Array.from(slices.names, (one) => {
      const lower = words.length ? one.toLowerCase() : "";
      return Number(words.every((word) => lower.includes(word)) && (name === undefined || one === name));
    });
    // A name alone doesn't match parts of slices, which the critical path has.
    const ofKind = Uint8Array.from(slices.categories, (one, place) =>
      Number(kind === undefined ? name === undefined || !slices.isPath[place] : one === kind));
    this.count = 0;
    this.longest = -1; // the first of the longest
    const buffer = new Int32Array(this.isActive ? slices.count : 0);
    /** @type {Map<import("./slices.js").Row, Int32Array>} row → indices of its matches, ascending */
    this.byRow = new Map();
    if (!this.isActive) return;
    const { name: names, category, duration } = slices;
    const isAnyKind = ofKind.every(Boolean);
    let most = -1;
    for (const row of slices.rows) {
      if (rank !== undefined && (slices.lanes[row.lane].rank ?? rank) !== rank) continue;
      const first = this.count;
      for (let index = row.first; index < row.last; index += 1) {
        if (!isNamed[names[index]] || !(isAnyKind || ofKind[category[index]])) continue;
        buffer[this.count++] = index;
        if (duration[index] <= most) continue;
        most = duration[index];
        this.longest = index;
      }
      if (this.count > first) this.byRow.set(row, buffer.subarray(first, this.count));
    }
  }

  /**
   * The next match in order of time (for equal starts, in order of the columns); wraps around.
   * @param {number} index the slice to continue from, -1 for none
   * @param {1 | -1} direction
   * @param {number} time to continue from without a slice
   */
  next(index, direction, time) {
    const from = index >= 0 ? this.slices.begin[index] : time;
    const after = index >= 0 ? index : direction > 0 ? -1 : Infinity;
    return this.nearest(from, after, direction) ?? this.nearest(-direction * Infinity, NaN, direction) ?? -1;
  }

  /**
   * Number of matches before a match, in order of time.
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
   * Number of matches in a row before a slice, in order of time.
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
