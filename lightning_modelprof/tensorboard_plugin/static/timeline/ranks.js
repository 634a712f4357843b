// Merges the timelines of multiple ranks: one time axis, one zoom, one selection.

/** @typedef {import("../columns.js").Unpacked} Unpacked */

const OF_SLICES = ["begin", "duration", "name", "category", "detail", "launch"];

/**
 * Merges columns. Clocks of ranks differ, so the first step that all of them have starts at the same time; without
 * such a step, all traces start at the same time. Devices come first, rank by rank, then threads.
 * @param {{rank: number | null, unpacked: Unpacked}[]} ranks
 * @returns {Unpacked}
 */
export function mergeRanks(ranks) {
  if (ranks.length === 1) return ranks[0].unpacked;
  const { shifts, note } = alignment(ranks.map(({ unpacked }) => unpacked.meta));
  const [names, categories] = [new Numbers(), new Numbers()];
  /** @type {any} */
  const meta = {
    ...ranks[0].unpacked.meta,
    begin_ns: Math.min(...ranks.map(({ unpacked }, at) => unpacked.meta.begin_ns + shifts[at])),
    end_ns: Math.max(...ranks.map(({ unpacked }, at) => unpacked.meta.end_ns + shifts[at])),
    details: [], rows: [], counters: [], steps_of_rank: {}, notes: [note],
  };
  const count = ranks.reduce((sum, { unpacked }) => sum + (unpacked.columns.get("begin")?.length ?? 0), 0);
  /** @type {Map<string, Float64Array>} */
  const columns = new Map(OF_SLICES.map((name) => [name, new Float64Array(count)]));
  const { lanes, position } = lanesOf(ranks);
  let first = 0;
  ranks.forEach(({ rank, unpacked }, at) => {
    const label = rank ?? at;
    const own = unpacked.meta;
    const numbers = { name: names.of(own.names), category: categories.of(own.categories) };
    const put = (/** @type {string} */ name, /** @type {(value: number) => number} */ change) => {
      const values = /** @type {Float64Array} */ (unpacked.columns.get(name));
      const whole = /** @type {Float64Array} */ (columns.get(name));
      for (let place = 0; place < values.length; place += 1) whole[first + place] = change(values[place]);
    };
    const [numDetails, offset] = [meta.details.length, first];
    put("begin", (ns) => ns + shifts[at]);
    put("duration", (ns) => ns);
    put("name", (number) => numbers.name[number]);
    put("category", (number) => numbers.category[number]);
    put("detail", (number) => (number < 0 ? -1 : number + numDetails));
    put("launch", (place) => (place < 0 ? -1 : place + offset));
    for (const detail of own.details) meta.details.push(detail);
    for (const [lane, depth, number] of own.rows) meta.rows.push([position[at][lane], depth, number]);
    own.counters.forEach((/** @type {any} */ counter, /** @type {number} */ number) => {
      const place = meta.counters.length;
      meta.counters.push({ ...counter, group: groupOf(label, counter.group) });
      for (const what of ["time", "value"]) {
        const values = /** @type {Float64Array} */ (unpacked.columns.get(`counter_${number}_${what}`));
        columns.set(`counter_${place}_${what}`, what === "time" ? Float64Array.from(values, (ns) => ns + shifts[at]) : values);
      }
    });
    meta.steps_of_rank[label] = own.steps.map((/** @type {number[]} */ [number, begin, end]) =>
      [number, begin + shifts[at], end + shifts[at]]);
    meta.notes.push(...own.notes.map((/** @type {string} */ text) => `Rank ${label}: ${text}`));
    first += unpacked.columns.get("begin")?.length ?? 0;
  });
  Object.assign(meta, { lanes, names: names.texts, categories: categories.texts, steps: meta.steps_of_rank[ranks[0].rank ?? 0] });
  return { meta, columns };
}

/**
 * Time shift of each trace.
 * @param {any[]} metas
 * @returns {{shifts: number[], note: string}}
 */
function alignment(metas) {
  const begins = metas.map(({ steps }) => new Map(steps.map((/** @type {number[]} */ [number, begin]) => [number, begin])));
  const common = [...begins[0].keys()].find((number) => begins.every((own) => own.has(number)));
  const times = metas.map(({ begin_ns }, at) => (common === undefined ? begin_ns : begins[at].get(common)));
  const where = common === undefined ? "the start of each trace" : `the start of step ${common}`;
  return {
    shifts: times.map((time) => times[0] - time),
    note: `Rank clocks differ, so traces are aligned at ${where}. The steps above the lanes are the first rank's.`,
  };
}

/**
 * @param {{rank: number | null, unpacked: Unpacked}[]} ranks
 * @returns {{lanes: any[], position: number[][]}} `position`: index of each rank's lanes among all
 */
function lanesOf(ranks) {
  const all = ranks.flatMap(({ rank, unpacked }, at) =>
    unpacked.meta.lanes.map((/** @type {any} */ lane, /** @type {number} */ place) => {
      const label = rank ?? at;
      return { at, place, lane: { ...lane, group: groupOf(label, lane.group), rank: label } };
    }));
  const ordered = [...all.filter(({ lane }) => lane.is_device), ...all.filter(({ lane }) => !lane.is_device)];
  /** @type {number[][]} */
  const position = ranks.map(() => []);
  ordered.forEach(({ at, place }, number) => (position[at][place] = number));
  return { lanes: ordered.map(({ lane }) => lane), position };
}

/**
 * @param {number} rank
 * @param {string} group
 */
function groupOf(rank, group) {
  return `rank ${rank} ${group}`;
}

/** Texts, numbered without repetition. */
class Numbers {
  constructor() {
    /** @type {Map<string, number>} */
    this.known = new Map();
  }

  /**
   * Numbers of some texts; new ones get the next.
   * @param {string[]} texts
   */
  of(texts) {
    return texts.map((text) => {
      if (!this.known.has(text)) this.known.set(text, this.known.size);
      return /** @type {number} */ (this.known.get(text));
    });
  }

  get texts() {
    return [...this.known.keys()];
  }
}
