// Slice counts and times in a time range, by name and by category.

import { firstAbove, firstFrom } from "../sorted.js";

/** @typedef {{label: string, count: number, ns: number}} Sum */

/**
 * Sums of durations, clipped to the range, of slices that overlap it; nested slices count again.
 * @param {import("./slices.js").Slices} slices
 * @param {number} from
 * @param {number} to
 * @returns {{byName: Sum[], byCategory: Sum[]}} each with the largest first
 */
export function rangeSums(slices, from, to) {
  const { begin, end, name, category, isPath } = slices;
  const hasPath = isPath.includes(true);
  const names = new Tally(slices.names);
  const categories = new Tally(slices.categories);
  for (const row of slices.rows) {
    const first = firstAbove(end, row.first, row.last, from);
    const last = firstFrom(begin, first, row.last, to);
    for (let index = first; index < last; index += 1) {
      const ns = Math.min(to, end[index]) - Math.max(from, begin[index]);
      if (!hasPath || !isPath[category[index]]) names.add(name[index], ns); // parts of other slices
      categories.add(category[index], ns);
    }
  }
  return { byName: names.sums(), byCategory: categories.sums() };
}

/** @typedef {{group: string, busy: number, idle: number, causes: Sum[]}} DeviceTime `causes`: largest first */

/**
 * How long each device is busy and idle in a range. A device is known from its first slice to its last, and busy when
 * it isn't idle. Without idle time in the trace, there are no figures.
 * @param {import("./slices.js").Slices} slices
 * @param {number} from
 * @param {number} to
 * @returns {DeviceTime[]}
 */
export function deviceTimes(slices, from, to) {
  const { begin, end, category, isIdle } = slices;
  if (!isIdle.includes(true)) return [];
  /** @type {Map<string, {first: number, last: number, tally: Tally}>} */
  const devices = new Map();
  for (const row of slices.rows) {
    const { group, isDevice } = slices.lanes[row.lane];
    if (!isDevice || row.first === row.last) continue;
    const device = devices.get(group) ?? { first: Infinity, last: -Infinity, tally: new Tally(slices.categories) };
    devices.set(group, device);
    device.first = Math.min(device.first, begin[row.first]);
    device.last = Math.max(device.last, end[row.last - 1]);
    const last = firstFrom(begin, row.first, row.last, to);
    for (let index = firstAbove(end, row.first, row.last, from); index < last; index += 1) {
      if (!isIdle[category[index]]) continue;
      device.tally.add(category[index], Math.min(to, end[index]) - Math.max(from, begin[index]));
    }
  }
  return Array.from(devices, ([group, { first, last, tally }]) => {
    const causes = tally.sums();
    const idle = causes.reduce((sum, { ns }) => sum + ns, 0);
    const known = Math.max(0, Math.min(to, last) - Math.max(from, first));
    return { group, busy: Math.max(0, known - idle), idle, causes };
  });
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
