// The columns as a Chrome trace again, for Perfetto and other readers. It is written in pieces, so that a million
// slices need no giant string and the page stays alive meanwhile.

/** @typedef {import("./slices.js").Slices} Slices */

const PIECE = 20_000; // events
const PID = 1; // of the first group

/** @type {Record<string, string>} what Kineto calls our categories */
const KINETO = {
  operator: "cpu_op", "runtime call": "cuda_runtime", kernel: "kernel", memcpy: "gpu_memcpy", memset: "gpu_memset",
  "python function": "python_function", synchronization: "cuda_sync", "profiler overhead": "overhead",
  step: "user_annotation", phase: "user_annotation", module: "user_annotation", "data loading": "user_annotation",
  "user range": "user_annotation", "device range": "gpu_user_annotation",
};

/**
 * @param {Slices} slices
 * @returns {Promise<Blob>} JSON
 */
export async function chromeTrace(slices) {
  const encoder = new TextEncoder();
  /** @type {Uint8Array<ArrayBuffer>[]} */
  const parts = [];
  for (const text of tracePieces(slices)) {
    parts.push(encoder.encode(text));
    await new Promise((resolve) => setTimeout(resolve)); // input and drawing in between
  }
  return new Blob(parts, { type: "application/json" });
}

/**
 * @param {Slices} slices
 * @returns {Promise<Blob>} the same, compressed
 */
export async function gzippedTrace(slices) {
  const packed = (await chromeTrace(slices)).stream().pipeThrough(new CompressionStream("gzip"));
  return new Response(packed, { headers: { "Content-Type": "application/gzip" } }).blob();
}

/**
 * The text of the trace, some thousand events at a time.
 * @param {Slices} slices
 */
function* tracePieces(slices) {
  const groups = [...new Set([...slices.lanes, ...slices.counters].map(({ group }) => group))];
  const pids = new Map(groups.map((group, place) => [group, PID + place]));
  /** @param {{group: string}} lane */
  const pidOf = (lane) => /** @type {number} */ (pids.get(lane.group));
  yield `{"traceEvents":[\n${nameEvents(slices, groups, pidOf).join(",\n")}`;
  for (const events of [sliceEvents(slices, pidOf), flowEvents(slices, pidOf), counterEvents(slices, pidOf)]) {
    /** @type {string[]} */
    let piece = [];
    for (const event of events) {
      piece.push(event);
      if (piece.length < PIECE) continue;
      yield `,\n${piece.join(",\n")}`;
      piece = [];
    }
    if (piece.length) yield `,\n${piece.join(",\n")}`;
  }
  yield "\n]}\n";
}

/**
 * @param {Slices} slices
 * @param {string[]} groups
 * @param {(lane: {group: string}) => number} pidOf
 */
function nameEvents(slices, groups, pidOf) {
  const events = groups.map((group) => ({
    ph: "M", name: "process_name", pid: pidOf({ group }), tid: 0, args: { name: group },
  }));
  const lanes = slices.lanes.flatMap((lane, place) => [
    { ph: "M", name: "thread_name", pid: pidOf(lane), tid: place + 1, args: { name: lane.label } },
    { ph: "M", name: "thread_sort_index", pid: pidOf(lane), tid: place + 1, args: { sort_index: place } },
  ]);
  return [...events, ...lanes].map((event) => JSON.stringify(event));
}

/**
 * @param {Slices} slices
 * @param {(lane: {group: string}) => number} pidOf
 */
function* sliceEvents(slices, pidOf) {
  const names = slices.names.map((name) => JSON.stringify(name));
  const details = slices.details.map((detail) => JSON.stringify(detail));
  const isLaunch = new Uint8Array(slices.count);
  /** @param {number} index a batch launches no work of a device, which readers would take its fetch for */
  const isOfBatch = (index) => slices.isBatch[slices.category[slices.launch[index]] ?? -1];
  /** @param {number} index idle time and the critical path are no events of the trace */
  const isDerived = (index) => slices.isIdle[slices.category[index]] || slices.isPath[slices.category[index]];
  for (let index = 0; index < slices.count; index += 1) {
    if (slices.launch[index] >= 0 && !isDerived(index) && !isOfBatch(index)) isLaunch[slices.launch[index]] = 1;
  }
  for (const { lane, first, last } of slices.rows) {
    const { isDevice } = slices.lanes[lane];
    const place = `"pid":${pidOf(slices.lanes[lane])},"tid":${lane + 1}`;
    const categories = slices.categories.map((category) => JSON.stringify(kinetoOf(category, isDevice)));
    for (let index = first; index < last; index += 1) {
      if (isDerived(index)) continue;
      const launch = isLaunch[index] ? index : isOfBatch(index) ? -1 : slices.launch[index];
      const detail = slices.detail[index];
      const id = launch >= 0 ? `"correlation":${launch + 1}` : "";
      const known = detail >= 0 ? `"details":${details[detail]}` : "";
      const args = id || known ? `,"args":{${id}${id && known ? "," : ""}${known}}` : "";
      yield `{"ph":"X","cat":${categories[slices.category[index]]},"name":${names[slices.name[index]]},${place},` +
        `"ts":${microseconds(slices.begin[index])},"dur":${microseconds(slices.duration[index])}${args}}`;
    }
  }
}

/**
 * @param {string} category
 * @param {boolean} isDevice
 */
function kinetoOf(category, isDevice) {
  if (category === "communication") return isDevice ? "kernel" : "user_annotation";
  return Object.hasOwn(KINETO, category) ? KINETO[category] : category;
}

/**
 * An arrow from each launch to what it launched, from the end of each batch to the end of its fetch.
 * @param {Slices} slices
 * @param {(lane: {group: string}) => number} pidOf
 */
function* flowEvents(slices, pidOf) {
  /**
   * @param {number} index
   * @param {Float64Array} times
   */
  const placeOf = (index, times) => {
    const { lane } = slices.rowOf(index);
    return `"pid":${pidOf(slices.lanes[lane])},"tid":${lane + 1},"ts":${microseconds(times[index])}`;
  };
  for (let device = 0; device < slices.launch.length; device += 1) {
    const host = slices.launch[device];
    if (host < 0 || slices.isPath[slices.category[device]]) continue;
    const [kind, times] = slices.isBatch[slices.category[host]] ? ["batch", slices.end] : ["ac2g", slices.begin];
    const flow = `"cat":"${kind}","name":"${kind}","id":${device + 1}`;
    yield `{"ph":"s",${flow},${placeOf(host, times)}}`;
    yield `{"ph":"f","bp":"e",${flow},${placeOf(device, times)}}`;
  }
}

/**
 * @param {Slices} slices
 * @param {(lane: {group: string}) => number} pidOf
 */
function* counterEvents(slices, pidOf) {
  for (const counter of slices.counters) {
    const start = `{"ph":"C","name":${JSON.stringify(counter.label)},"pid":${pidOf(counter)},"tid":0`;
    const key = JSON.stringify(counter.unit || "value");
    for (let place = 0; place < counter.times.length; place += 1) {
      yield `${start},"ts":${microseconds(counter.times[place])},"args":{${key}:${counter.values[place]}}}`;
    }
  }
}

/**
 * Whole nanoseconds as microseconds with all their decimals; a division would round.
 * @param {number} ns
 */
function microseconds(ns) {
  const digits = String(Math.abs(ns)).padStart(4, "0");
  return `${ns < 0 ? "-" : ""}${digits.slice(0, -3)}.${digits.slice(-3)}`;
}
