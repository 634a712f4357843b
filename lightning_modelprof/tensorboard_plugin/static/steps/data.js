// The steps of a run as typed arrays, and questions about one of them.

import { firstFrom } from "../sorted.js";

const NOT_MEASURED = -1;

/**
 * @typedef {Object} Layer what one layer of the stacked chart is made of
 * @property {string} key key of its phase, or "rest"
 * @property {string} label
 * @property {number} color number of its colour
 * @property {number[]} phases positions of its phases
 */

/** Every step of a run; a step is its place in the columns, from 0. */
export class Steps {
  /** @param {import("../columns.js").Unpacked} unpacked what show/step_columns.py packed */
  constructor({ meta, columns }) {
    const column = (/** @type {string} */ name) => {
      const values = columns.get(name);
      if (!values) throw new Error(`The steps have no column ${name}.`);
      return values;
    };
    this.number = column("step");
    this.duration = column("duration");
    this.samples = column("samples");
    this.exclusion = column("exclusion");
    this.tags = column("tags");
    this.count = this.number.length;
    /** @type {string[]} */
    this.exclusions = meta.exclusions;
    /** @type {[number, string][]} */
    this.tagWords = Object.entries(meta.tags).map(([bit, word]) => [Number(bit), String(word)]);
    /** @type {string[]} */
    this.notes = meta.notes;
    /** @type {{key: string, label: string, times: Float64Array, isMeasured: boolean}[]} */
    this.phases = meta.phases.map((/** @type {[string, string]} */ [key, label], /** @type {number} */ place) => ({
      key,
      label,
      times: column(`phase_${place}`),
      isMeasured: !meta.unmeasured.includes(place),
    }));
    this.profiler = this.phases.find((phase) => phase.key === "profiler")?.times;
    /** @type {Layer[]} */
    this.layers = meta.layers.map((/** @type {Layer} */ layer) => ({
      ...layer,
      key: layer.phases.length === 1 ? this.phases[layer.phases[0]].key : "rest",
    }));
    this.hasSamples = !this.samples.includes(NOT_MEASURED);
    this.hasConsecutiveNumbers = this.count > 0 && this.number[this.count - 1] - this.number[0] === this.count - 1;
  }

  /**
   * Its time without what the profiler did in it, as the benchmark takes a clean step.
   * @param {number} step
   */
  net(step) {
    return this.duration[step] - Math.max(this.profiler?.[step] ?? 0, 0);
  }

  /**
   * Why the benchmark leaves it out; "" of a clean step.
   * @param {number} step
   */
  reason(step) {
    return this.exclusions[this.exclusion[step]];
  }

  /**
   * All that was special about it.
   * @param {number} step
   */
  marks(step) {
    return this.tagWords.filter(([bit]) => this.tags[step] & bit).map(([, word]) => word);
  }

  /**
   * Self time of a phase in ns; null where it could not be measured.
   * @param {number} phase
   * @param {number} step
   */
  time(phase, step) {
    const time = this.phases[phase].times[step];
    return time === NOT_MEASURED ? null : time;
  }

  /**
   * The first step whose number is at least this one, or the last step.
   * @param {number} number
   */
  placeOf(number) {
    return firstFrom(this.number, 0, this.count - 1, number);
  }
}
