// The drawings that need the packed columns: the steps of a run and the timeline of a trace.

import { unpackColumns } from "./columns.js";
import { make } from "./dom.js";
import { parseLink } from "./link.js";
import { askColumns } from "./server.js";

/** @typedef {import("./link.js").Choice} Choice */
/** @typedef {{destroy: () => void}} Drawing */
/** @typedef {{tag: string, kind: string, rank: number | null}} Columns */

const DRAWINGS = {
  steps: { load: async () => (await import("./steps/steps.js")).mountSteps, name: "at_steps" },
  timeline: { load: async () => (await import("./timeline/view.js")).mountTimeline, name: "at_time" },
};

/**
 * Fetch columns and draw them.
 * @param {HTMLElement} container
 * @param {Columns} columns
 * @param {import("./steps/readout.js").Words} words what a step and its samples are called
 * @param {Choice} choice what is drawn, and which part of it the reader looks at
 * @param {(changes: Choice) => void} remember
 * @param {() => boolean} isWanted whether the reader still waits for it
 * @returns {Promise<Drawing | null>}
 */
export async function draw(container, columns, words, choice, remember, isWanted) {
  const { load, name } = DRAWINGS[/** @type {"steps" | "timeline"} */ (columns.kind)];
  container.append(make("p", { class: "waiting", role: "status" }, "Loading…"));
  const packed = askColumns({
    run: choice.run,
    tag: columns.tag,
    kind: columns.kind,
    rank: columns.rank === null ? "" : String(columns.rank),
  });
  const [mount, unpacked] = await Promise.all([load(), packed.then(unpackColumns)]);
  if (!isWanted()) return null;
  container.replaceChildren();
  return mount(container, unpacked, {
    initial: { ...parseLink(choice[name]), find: findOf(choice, columns) },
    onChange: (/** @type {any} */ state) => remember({ [name]: JSON.stringify(state) }),
    title: `${choice.run} ${columns.tag}`,
    words,
  });
}

/**
 * What a link into the drawing wants to have found; it may be of one rank.
 * @param {Choice} choice
 * @param {Columns} columns
 */
function findOf({ find }, { rank }) {
  const wanted = parseLink(find);
  return wanted && (rank === null || (wanted.rank ?? rank) === rank) ? wanted : undefined;
}
