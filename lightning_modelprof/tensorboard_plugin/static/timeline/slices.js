// A trace's contents: slices in rows, and queries on them. Nothing here draws.
//
// All times are nanoseconds on the columns' clock. Slices are identified by their index in the columns.

import { RangeMax } from "./range_max.js";
import { firstAbove, firstFrom } from "../sorted.js";

/** @typedef {{lane: number, depth: number, first: number, last: number}} Row its slices are [first, last) */
/** @typedef {{label: string, group: string, isDevice: boolean, rank: number | undefined, rows: Row[]}} Lane `rank`: if there are multiple */
/** @typedef {{label: string, group: string, unit: string, times: Float64Array, values: Float64Array, highest: RangeMax, least: number, most: number}} Counter `least`, `most`: of its values and 0 */
/** @typedef {{number: number, begin: number, end: number}} Step */

const IDLE = "idle: "; // prefix of the categories of idle time
const PATH = "critical path: "; // prefix of those of the critical path, whose slices are parts of others
const BATCH = "batch"; // made by a DataLoader worker; launches the fetch of the step that uses it

export class Slices {
  /** @param {import("../columns.js").Unpacked} unpacked */
  constructor({ meta, columns }) {
    /** @param {string} name */
    const column = (name) => {
      const values = columns.get(name);
      if (!values) throw new Error(`The timeline is damaged: it has no column ${name}.`);
      return values;
    };
    this.begin = column("begin");
    this.duration = column("duration");
    this.name = column("name");
    this.category = column("category");
    this.detail = column("detail");
    this.launch = column("launch");
    this.count = this.begin.length;
    /** @type {string[]} */
    this.names = meta.names;
    /** @type {string[]} */
    this.categories = meta.categories;
    this.isIdle = this.categories.map((category) => category.startsWith(IDLE)); // by category
    this.isPath = this.categories.map((category) => category.startsWith(PATH)); // by category
    this.isBatch = this.categories.map((category) => category === BATCH); // by category
    /** @type {string[]} */
    this.details = meta.details;
    this.traceBegin = /** @type {number} */ (meta.begin_ns);
    this.traceEnd = /** @type {number} */ (Math.max(meta.end_ns, meta.begin_ns + 1));
    /** @type {Step[]} */
    this.steps = stepsOf(meta.steps);
    /** @type {Step[][]} by rank, if there are multiple */
    this.stepsOfRank = Object.entries(meta.steps_of_rank ?? {}).reduce((all, [rank, steps]) => {
      all[Number(rank)] = stepsOf(steps);
      return all;
    }, /** @type {Step[][]} */ ([]));
    this.end = new Float64Array(this.count);
    this.busyBefore = new Float64Array(this.count + 1); // total duration of all earlier slices, for sums of ranges
    for (let index = 0; index < this.count; index += 1) {
      this.end[index] = this.begin[index] + this.duration[index];
      this.busyBefore[index + 1] = this.busyBefore[index] + this.duration[index];
    }
    this.longest = new RangeMax(this.duration);
    /** @type {Lane[]} */
    this.lanes = meta.lanes.map((/** @type {any} */ lane) => ({
      label: lane.label, group: lane.group, isDevice: lane.is_device, rank: lane.rank, rows: [],
    }));
    /** @type {Row[]} */
    this.rows = [];
    let first = 0;
    for (const [lane, depth, count] of meta.rows) {
      const row = { lane, depth, first, last: first + count };
      this.rows.push(row);
      this.lanes[lane].rows[depth] = row;
      first = row.last;
    }
    this.rowEnds = this.rows.map((row) => row.last);
    this.check(first);
    /** @type {Counter[]} */
    this.counters = meta.counters.map((/** @type {any} */ counter, /** @type {number} */ place) => {
      const values = column(`counter_${place}_value`);
      const { label, group, unit } = counter;
      const least = values.reduce((low, value) => Math.min(low, value), 0);
      const most = values.reduce((high, value) => Math.max(high, value), 0);
      const times = column(`counter_${place}_time`);
      return { label, group, unit, times, values, highest: new RangeMax(values), least, most };
    });
    /** @type {string[]} */
    this.notes = meta.notes;
    /** @type {{first: Int32Array, next: Int32Array} | null} per slice: the first one it launched; the one after that */
    this.launched = null;
  }

  /**
   * Check that the columns fit together, so that nothing is drawn if they don't.
   * @param {number} inRows number of slices in all rows
   */
  check(inRows) {
    const columns = [this.duration, this.name, this.category, this.detail, this.launch];
    const isWhole = inRows === this.count && columns.every((column) => column.length === this.count);
    const isWithin = (/** @type {Float64Array} */ column, /** @type {number} */ end) => column.every((at) => at < end);
    const isNamed =
      isWithin(this.name, this.names.length) &&
      isWithin(this.category, this.categories.length) &&
      isWithin(this.detail, this.details.length) &&
      isWithin(this.launch, this.count);
    if (!isWhole || !isNamed) throw new Error("The timeline is damaged: its columns don't match.");
  }

  /** @param {number} index */
  nameOf(index) {
    return this.names[this.name[index]];
  }

  /** @param {number} index */
  categoryOf(index) {
    return this.categories[this.category[index]] ?? "";
  }

  /** @param {number} index */
  rowOf(index) {
    return this.rows[firstFrom(this.rowEnds, 0, this.rowEnds.length, index + 1)];
  }

  /**
   * The slice of a row that takes most of the time [from, to); -1 if there is none. For equal times, the first.
   * @param {Row} row
   * @param {number} from
   * @param {number} to
   */
  mostIn(row, from, to) {
    const first = firstAbove(this.end, row.first, row.last, from);
    return this.mostOf(first, firstFrom(this.begin, first, row.last, to), from, to);
  }

  /**
   * Of the adjacent slices [first, last), which all overlap the time [from, to), the one that takes most of it.
   * @param {number} first
   * @param {number} last
   * @param {number} from
   * @param {number} to
   */
  mostOf(first, last, from, to) {
    if (last - first < 2) return last > first ? first : -1;
    // Only the outer two can extend beyond the time.
    let best = first;
    let most = this.end[first] - Math.max(from, this.begin[first]);
    if (last - first > 2) {
      const inner = this.longest.largest(first + 1, last - 1);
      if (this.duration[inner] > most) most = this.duration[(best = inner)];
    }
    return Math.min(to, this.end[last - 1]) - this.begin[last - 1] > most ? last - 1 : best;
  }

  /**
   * Time within [from, to) taken by a row's adjacent slices [first, last), which overlap it.
   * @param {number} first
   * @param {number} last
   * @param {number} from
   * @param {number} to
   */
  busyIn(first, last, from, to) {
    if (first >= last) return 0;
    const before = Math.max(0, from - this.begin[first]);
    const after = Math.max(0, this.end[last - 1] - to);
    return this.busyBefore[last] - this.busyBefore[first] - before - after;
  }

  /**
   * The slice one level up that contains this one; -1 without one.
   * @param {number} index
   */
  parentOf(index) {
    const { lane, depth } = this.rowOf(index);
    const row = this.lanes[lane].rows[depth - 1];
    if (!row) return -1;
    const parent = firstFrom(this.begin, row.first, row.last, this.begin[index] + 0.5) - 1;
    return parent >= row.first && this.end[parent] >= this.end[index] ? parent : -1;
  }

  /**
   * A slice and all that contain it, innermost first; skips slices that end before it does.
   * @param {number} index
   */
  around(index) {
    const { lane, depth } = this.rowOf(index);
    const found = [index];
    for (let above = depth - 1; above >= 0; above -= 1) {
      const row = this.lanes[lane].rows[above];
      const at = row ? firstFrom(this.begin, row.first, row.last, this.begin[index] + 0.5) - 1 : -1;
      if (row && at >= row.first && this.end[at] >= this.end[index]) found.push(at);
    }
    return found;
  }

  /**
   * The slices one level down, [first, last).
   * @param {number} index
   * @returns {[number, number]}
   */
  childrenOf(index) {
    const { lane, depth } = this.rowOf(index);
    const row = this.lanes[lane].rows[depth + 1];
    if (!row) return [0, 0];
    const first = firstFrom(this.begin, row.first, row.last, this.begin[index]);
    const last = firstFrom(this.begin, first, row.last, this.end[index]);
    return [first, last];
  }

  /**
   * Duration minus that of the slices one level down.
   * @param {number} index
   */
  selfTime(index) {
    const [first, last] = this.childrenOf(index);
    return this.duration[index] - (this.busyBefore[last] - this.busyBefore[first]);
  }

  /**
   * The device slices that a CPU slice launched; for a batch, the fetch of the step that used it.
   * @param {number} index
   */
  launchesOf(index) {
    const { first, next } = (this.launched ??= this.linkLaunches());
    const launches = [];
    for (let device = first[index]; device >= 0; device = next[device]) launches.push(device);
    return launches;
  }

  /**
   * The slice that launched this one, else the first slice that it launched; -1 without either.
   * @param {number} index
   */
  linkedTo(index) {
    return this.launch[index] >= 0 ? this.launch[index] : (this.launchesOf(index)[0] ?? -1);
  }

  /**
   * From the first start to the last end of some slices.
   * @param {number[]} places
   * @returns {[number, number]}
   */
  spanOf(places) {
    return [Math.min(...places.map((place) => this.begin[place])), Math.max(...places.map((place) => this.end[place]))];
  }

  linkLaunches() {
    const first = new Int32Array(this.count).fill(-1);
    const next = new Int32Array(this.count);
    const hasPath = this.isPath.includes(true);
    for (let device = this.launch.length - 1; device >= 0; device -= 1) {
      const host = this.launch[device];
      if (host < 0 || (hasPath && this.isPath[this.category[device]])) continue;
      next[device] = first[host];
      first[host] = device;
    }
    return { first, next };
  }

  /**
   * The step at a time; undefined between steps.
   * @param {number} time
   */
  stepAt(time) {
    return this.steps.find((step) => step.begin <= time && time < step.end);
  }

  /**
   * The step of its rank in which a slice starts; undefined between steps.
   * @param {number} index
   */
  stepOf(index) {
    const steps = this.stepsOfRank[this.lanes[this.rowOf(index).lane].rank ?? -1] ?? this.steps;
    return steps.find((step) => step.begin <= this.begin[index] && this.begin[index] < step.end);
  }

  /** From the start of the first step to the end of the last one; without steps, the whole trace. */
  get home() {
    const steps = [this.steps, ...Object.values(this.stepsOfRank)].flat();
    const begin = Math.min(...steps.map((step) => step.begin));
    const end = Math.max(...steps.map((step) => step.end));
    return begin < end ? [begin, end] : [this.traceBegin, this.traceEnd];
  }
}

/**
 * @param {any} steps as packed
 * @returns {Step[]}
 */
function stepsOf(steps) {
  return steps.map((/** @type {number[]} */ [number, begin, end]) => ({ number, begin, end }));
}
