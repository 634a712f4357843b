// Requests to the plugin's own routes, and to nothing else.

/**
 * @typedef {Object} Profile one entry of a run: a whole loop, or one window of it
 * @property {string} tag
 * @property {number} wall_time seconds since 1970
 * @property {string} problem why it can't be read; "" if it can
 * @property {"run" | "window"} [kind]
 * @property {string} [loop]
 * @property {number | null} [window]
 * @property {string} [label]
 * @property {number[]} [ranks]
 * @property {[number, number][]} [recorded] first and last number of each series of steps in a window
 * @property {string} [model] of a run; "" if unknown
 * @property {string} [created] when a run started, in ISO 8601; "" if unknown
 */

/**
 * @typedef {Object} Run
 * @property {string} name
 * @property {Profile[]} profiles
 */

/**
 * @typedef {Object} Contents
 * @property {Run[]} runs
 * @property {{key: string, title: string}[]} views
 */

/**
 * @typedef {Object} ViewAnswer
 * @property {string} title
 * @property {import("./parts.js").ViewDocument[]} documents
 * @property {string} empty instructions if there's nothing to show
 * @property {{tag: string, kind: string, rank: number | null, file?: string, where?: string}[]} [columns] `file`: its trace; `where`: where that is instead
 * @property {import("./steps/readout.js").Words} words for a step and its samples
 */

/**
 * @param {string} route
 * @param {Record<string, string>} parameters omitted if ""
 */
async function ask(route, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "");
  let response;
  try {
    response = await fetch(`./${route}?${new URLSearchParams(given)}`);
  } catch {
    throw new Error("TensorBoard doesn't answer. Is it still running?");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new Error(answer.error ?? `TensorBoard answered with status ${response.status}.`);
}

/**
 * A JSON answer.
 * @param {string} route
 * @param {Record<string, string>} [parameters]
 */
export async function askJson(route, parameters = {}) {
  return (await ask(route, parameters)).json();
}

/**
 * Packed columns.
 * @param {Record<string, string>} parameters
 * @returns {Promise<ArrayBuffer>}
 */
export async function askColumns(parameters) {
  return (await ask("columns", parameters)).arrayBuffer();
}

/**
 * A trace as its run saved it.
 * @param {Record<string, string>} parameters
 */
export async function askTrace(parameters) {
  return (await ask("trace", parameters)).blob();
}
