// The drawings that need packed columns: a run's steps and a trace's timeline.

import { unpackColumns } from "./columns.js";
import { make } from "./dom.js";
import { parseLink, shortAddressOf } from "./link.js";
import { askColumns, askTrace } from "./server.js";

/** @typedef {import("./link.js").Choice} Choice */
/** @typedef {{destroy: () => void}} Drawing */
/** @typedef {{tag: string, kind: string, rank: number | null, file?: string, where?: string}} Columns */

/** @typedef {import("./columns.js").Unpacked} Unpacked */
/** @typedef {{rank: number | null, unpacked: Unpacked}} Ranked */

const DRAWINGS = {
  steps: { load: loadSteps, name: "at_steps", isOne: false },
  timeline: { load: loadTimeline, name: "at_time", isOne: true },
};

async function loadSteps() {
  const { mountSteps } = await import("./steps/steps.js");
  return (/** @type {HTMLElement} */ place, /** @type {Ranked[]} */ [{ unpacked }], /** @type {any} */ options) =>
    mountSteps(place, unpacked, options);
}

/** All ranks share a time axis. */
async function loadTimeline() {
  return (await import("./timeline/view.js")).mountRanks;
}

/**
 * Group columns into drawings; some drawings show all ranks.
 * @param {Columns[]} columns
 * @returns {Columns[][]}
 */
export function drawnTogether(columns) {
  const isOne = columns.length > 0 && columns.every(({ kind }) => DRAWINGS[/** @type {"steps"} */ (kind)].isOne);
  return isOne ? [columns] : columns.map((one) => [one]);
}

/**
 * Fetch columns and draw them.
 * @param {HTMLElement} container
 * @param {Columns[]} columns of one drawing, by rank
 * @param {object} known about the loop: its words for a step and its samples, and where a step's trace is
 * @param {Choice} choice the current one, with the reader's settings
 * @param {(changes: Choice) => void} remember
 * @param {() => boolean} isWanted whether the reader is still waiting for it
 * @returns {Promise<Drawing | null>}
 */
export async function draw(container, columns, known, choice, remember, isWanted) {
  const { load, name } = DRAWINGS[/** @type {"steps" | "timeline"} */ (columns[0].kind)];
  container.append(make("p", { class: "waiting", role: "status" }, "Loading…"));
  const asked = Promise.allSettled(columns.map((one) => ask(one, choice)));
  const [mount, answers] = await Promise.all([load(), asked]);
  const ranks = answers.flatMap((answer) => (answer.status === "fulfilled" ? [answer.value] : []));
  const lost = answers.flatMap((answer) => (answer.status === "rejected" ? [answer.reason] : []));
  if (!ranks.length) throw lost[0];
  if (!isWanted()) return null;
  container.replaceChildren(...lost.map((error) => make("p", { class: "problem", role: "alert" }, String(error.message))));
  const { run, profile, window, rank, view } = choice;
  const written = (/** @type {object} */ look) => ({ [name]: Object.keys(look).length ? JSON.stringify(look) : "" });
  /** @type {any} of all drawings; each uses what it knows */
  const options = {
    initial: { ...parseLink(choice[name]), find: findOf(choice, columns) },
    onChange: (/** @type {object} */ look) => remember(written(look)),
    linkTo: (/** @type {object} */ look) => shortAddressOf({ run, profile, window, rank, view, ...written(look) }),
    title: `${choice.run} ${columns[0].tag}`,
    trace: traceOf(columns, choice),
    ...known,
  };
  return mount(container, ranks, options);
}

/**
 * The trace of a timeline; with multiple ranks, of the first rank that has one.
 * @param {Columns[]} columns
 * @param {Choice} choice
 * @returns {import("./timeline/toolbar.js").TraceFile}
 */
function traceOf(columns, { run }) {
  const { file = "", where = "", tag, rank } = columns.find((one) => one.file) ?? columns[0];
  const which = columns.length > 1 ? ` (rank ${rank})` : "";
  return { file, where, which, load: () => askTrace({ run, tag, file }) };
}

/**
 * @param {Columns} columns
 * @param {Choice} choice
 * @returns {Promise<Ranked>}
 */
async function ask({ tag, kind, rank }, { run }) {
  const packed = await askColumns({ run, tag, kind, rank: rank === null ? "" : String(rank) });
  return { rank, unpacked: await unpackColumns(packed) };
}

/**
 * A link's target in the drawing; it may be for one rank.
 * @param {Choice} choice
 * @param {Columns[]} columns
 */
function findOf({ find }, columns) {
  const wanted = parseLink(find);
  const isHere = columns.some(({ rank }) => rank === null || (wanted?.rank ?? rank) === rank);
  return wanted && isHere ? wanted : undefined;
}
