// What slices do in a stretch of time: count and time by name and by category.

import { firstAbove, firstFrom } from "../sorted.js";

/** @typedef {{label: string, count: number, ns: number}} Sum */

/**
 * Sums of the durations, clipped to the range, of the slices that reach into it; those inside others count again.
 * @param {import("./slices.js").Slices} slices
 * @param {number} from
 * @param {number} to
 * @returns {{byName: Sum[], byCategory: Sum[]}} each with the largest first
 */
export function rangeSums(slices, from, to) {
  const { begin, end, name, category } = slices;
  const names = new Tally(slices.names);
  const categories = new Tally(slices.categories);
  for (const row of slices.rows) {
    const first = firstAbove(end, row.first, row.last, from);
    const last = firstFrom(begin, first, row.last, to);
    for (let index = first; index < last; index += 1) {
      const ns = Math.min(to, end[index]) - Math.max(from, begin[index]);
      names.add(name[index], ns);
      categories.add(category[index], ns);
    }
  }
  return { byName: names.sums(), byCategory: categories.sums() };
}

class Tally {
  /** @param {string[]} labels */
  constructor(labels) {
    this.labels = labels;
    this.counts = new Float64Array(labels.length);
    this.times = new Float64Array(labels.length);
  }

  /**
   * @param {number} label
   * @param {number} ns
   */
  add(label, ns) {
    this.counts[label] += 1;
    this.times[label] += ns;
  }

  sums() {
    const all = this.labels.map((label, place) => ({ label, count: this.counts[place], ns: this.times[place] }));
    return all.filter(({ count }) => count).sort((a, b) => b.ns - a.ns || b.count - a.count);
  }
}
