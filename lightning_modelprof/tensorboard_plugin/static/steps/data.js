// A run's steps as typed arrays, and queries on single steps.

import { NAMELESS, meaningOf } from "../page_colors.js";
import { firstFrom } from "../sorted.js";

/** @typedef {import("../columns.js").Unpacked} Unpacked */

const NOT_MEASURED = -1;

/**
 * @typedef {Object} Layer one layer of the stacked chart
 * @property {string} key key of its phase, or "rest"
 * @property {string} label
 * @property {string} color name of its color
 * @property {number[]} phases indices of its phases
 */

/**
 * The name of a layer's color, even if an older version of the package numbered the colors.
 * @param {string} key
 * @param {string | number} color
 */
function colorOf(key, color) {
  return typeof color === "string" ? color : meaningOf(key) || NAMELESS[color % NAMELESS.length];
}

/** All steps of a run; a step is its index in the columns, from 0. */
export class Steps {
  /** @param {Unpacked} unpacked as packed by show/tensorboard/profile_blob.py */
  constructor(unpacked) {
    const { meta, columns } = unpacked;
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
    /** @type {Layer[]} */
    this.layers = meta.layers.map((/** @type {Layer} */ layer) => {
      const key = layer.phases.length === 1 ? this.phases[layer.phases[0]].key : "rest";
      return { ...layer, key, color: colorOf(key, layer.color) };
    });
    this.hasSamples = !this.samples.includes(NOT_MEASURED);
    this.hasConsecutiveNumbers = this.count > 0 && this.number[this.count - 1] - this.number[0] === this.count - 1;
    const net = withoutProfiler(unpacked);
    this.hasProfilerTime = net !== null;
    /** @type {Steps} the same steps without the time of the phase Profiler, as the benchmark uses for clean ones */
    this.net = net ? new Steps(net) : this;
  }

  /**
   * Why the benchmark excludes it; "" for a clean step.
   * @param {number} step
   */
  reason(step) {
    return this.exclusions[this.exclusion[step]];
  }

  /**
   * Everything special about it.
   * @param {number} step
   */
  marks(step) {
    return this.tagWords.filter(([bit]) => this.tags[step] & bit).map(([, word]) => word);
  }

  /**
   * Self time of a phase in ns; null if not measured.
   * @param {number} phase
   * @param {number} step
   */
  time(phase, step) {
    const time = this.phases[phase].times[step];
    return time === NOT_MEASURED ? null : time;
  }

  /**
   * The first step with at least this number, or the last step.
   * @param {number} number
   */
  placeOf(number) {
    return firstFrom(this.number, 0, this.count - 1, number);
  }
}

/**
 * The columns with no time in the phase Profiler, which is subtracted from the whole steps.
 * @param {Unpacked} unpacked
 * @returns {Unpacked | null} null if there is none to subtract
 */
function withoutProfiler({ meta, columns }) {
  const place = meta.phases.findIndex((/** @type {[string, string]} */ [key]) => key === "profiler");
  const [duration, profiler] = [columns.get("duration"), columns.get(`phase_${place}`)];
  if (!duration || !profiler?.some((time) => time > 0)) return null;
  const net = duration.map((time, step) => time - Math.max(profiler[step], 0));
  const nothing = profiler.map((time) => Math.min(time, 0)); // missing values stay missing
  return { meta, columns: new Map([...columns, ["duration", net], [`phase_${place}`, nothing]]) };
}
