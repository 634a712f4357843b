// From what stands in the address to what is shown: a choice that is missing or gone becomes the nearest sensible one.

/** @typedef {import("./link.js").Choice} Choice */
/** @typedef {import("./server.js").Contents} Contents */
/** @typedef {import("./server.js").Profile} Profile */
/** @typedef {import("./server.js").Run} Run */

/** Names in the address of what is compared with. */
export const BEFORE = "before_";

/** The view that shows two choices side by side. */
export const COMPARE = "compare";

/**
 * Whether two choices are one; the order of their names does not matter, nor do names without a value.
 * @param {Choice} one
 * @param {Choice} other
 */
export function isSame(one, other) {
  return [...new Set([...Object.keys(one), ...Object.keys(other)])].every(
    (name) => (one[name] ?? "") === (other[name] ?? ""),
  );
}

/** What a link points at in a view: gone with the next choice, unless that one points as well. */
const POINTERS = ["find", "row"];

/** How the reader looks at a part → the choices that it goes with. Sorted columns are kept, whatever is shown. */
const LOOKS = {
  at_steps: ["run", "profile"],
  at_time: ["run", "window", "rank"],
  at_flames: ["run", "profile", "window", "rank"],
};

/**
 * The choice after the reader has chosen something else to look at.
 * @param {Choice} choice complete
 * @param {Choice} changes
 * @param {(choice: Choice) => Choice} completed
 */
export function chosen(choice, changes, completed) {
  const wanted = { ...choice, ...changes };
  for (const name of POINTERS) if (!(name in changes)) delete wanted[name];
  const next = completed(wanted);
  for (const [look, names] of Object.entries(LOOKS)) {
    if (!(look in changes) && names.some((name) => next[name] !== choice[name])) delete next[look];
  }
  if (next.find) delete next.at_time; // what is found is looked at
  return next;
}

/**
 * The choice after the reader has looked around in a part.
 * @param {Choice} choice
 * @param {Choice} looks
 */
export function lookedAt(choice, looks) {
  const next = { ...choice, ...looks };
  if ("at_time" in looks) delete next.find; // found, and left since then
  return next;
}

/**
 * Profiles of a run of one kind, the newest last.
 * @param {Run | undefined} run
 * @param {"run" | "window"} kind
 */
export function profilesOf(run, kind) {
  return run?.profiles.filter((profile) => profile.kind === kind) ?? [];
}

/**
 * Windows that belong to a loop: those whose tag begins as the run's does.
 * @param {Run | undefined} run
 * @param {string} profile tag of the chosen loop; "" for all
 */
export function windowsOf(run, profile) {
  const folder = profile.slice(0, profile.lastIndexOf("/") + 1);
  const windows = profilesOf(run, "window");
  return profile === "" ? windows : windows.filter(({ tag }) => tag.slice(0, tag.lastIndexOf("/") + 1) === folder);
}

/**
 * Where the trace of a step is: in the chosen window if that one holds it, else in the newest that does.
 * @param {Choice} choice complete
 * @param {Contents} contents
 * @param {number} step its number
 * @returns {object | null} for `data-goto`; null if no window recorded it
 */
export function traceOf(choice, contents, step) {
  const run = contents.runs.find(({ name }) => name === choice.run);
  const holding = windowsOf(run, choice.profile).filter(({ recorded = [] }) =>
    recorded.some(([first, last]) => step >= first && step <= last),
  );
  const window = holding.find(({ tag }) => tag === choice.window) ?? holding.at(-1);
  return window ? { view: "trace", window: window.tag, find: { step } } : null;
}

/**
 * What a link names that is not here; "" if all is.
 * @param {Choice} wanted as in the link
 * @param {Choice} shown complete
 */
export function whatIsGone(wanted, shown) {
  const gone = ["run", "profile", "window"].filter((name) => wanted[name] && wanted[name] !== shown[name]);
  return gone.length ? `This link's ${gone[0]} ${wanted[gone[0]]} no longer exists.` : "";
}

/**
 * The same choice with nothing missing and nothing that is not there.
 * @param {Choice} choice
 * @param {Contents} contents
 * @param {string} prefix of the names: "" or BEFORE
 * @returns {Choice}
 */
export function complete(choice, contents, prefix = "") {
  const wanted = (/** @type {string} */ name) => choice[prefix + name] ?? "";
  const run = contents.runs.find(({ name }) => name === wanted("run")) ?? defaultRun(contents.runs, choice, prefix);
  const loops = profilesOf(run, "run");
  const profile = nearest(loops, wanted("profile"));
  const windows = windowsOf(run, profile?.tag ?? "");
  const isSameRun = prefix === BEFORE && run?.name === choice.run;
  const window = nearest(windows, wanted("window") || (isSameRun ? (windowBefore(windows, choice.window) ?? "") : ""));
  const ranks = (window ?? profile)?.ranks ?? [];
  const rank = ranks.some((one) => String(one) === wanted("rank")) ? wanted("rank") : "";
  return {
    ...choice,
    [`${prefix}run`]: run?.name ?? "",
    [`${prefix}profile`]: profile?.tag ?? "",
    [`${prefix}window`]: window?.tag ?? "",
    [`${prefix}rank`]: rank,
  };
}

/**
 * The choice without what is compared with, where that is what the dashboard proposes itself: then it follows what
 * the reader looks at.
 * @param {Choice} choice complete
 * @param {Contents} contents
 * @returns {Choice}
 */
export function withoutUsualBefore(choice, contents) {
  const names = ["run", "profile", "window", "rank"].map((name) => BEFORE + name);
  const rest = Object.fromEntries(Object.entries(choice).filter(([name]) => !names.includes(name)));
  const usual = complete(rest, contents, BEFORE);
  return names.every((name) => (choice[name] ?? "") === usual[name]) ? rest : choice;
}

/**
 * To look at the run that was written to last. To compare with: the same run where its window has one before it, else
 * the newest of those that started before it, of the same model if there is one, else of the others.
 * @param {Run[]} all
 * @param {Choice} choice
 * @param {string} prefix
 */
function defaultRun(all, choice, prefix) {
  const readable = all.filter((run) => run.profiles.some(({ problem }) => !problem));
  const runs = readable.length ? readable : all;
  const chosen = all.find(({ name }) => name === choice.run);
  if (prefix !== BEFORE || !chosen) return newestRun(runs, writtenAt);
  if (windowBefore(windowsOf(chosen, choice.profile ?? ""), choice.window)) return chosen;
  const others = runs.filter((run) => run !== chosen);
  const earlier = others.filter((run) => startOf(run) < startOf(chosen));
  const likely = earlier.length ? earlier : others.length ? others : runs;
  const model = modelOf(chosen);
  const alike = likely.filter((run) => model !== "" && modelOf(run) === model);
  return newestRun(alike.length ? alike : likely, startOf);
}

/** @param {Run} run */
function modelOf(run) {
  return run.profiles.find(({ model }) => model)?.model ?? "";
}

/**
 * When a run was written to last.
 * @param {Run} run
 */
function writtenAt(run) {
  return Math.max(...run.profiles.map((profile) => profile.wall_time));
}

/**
 * When a run started, seconds since 1970; when it was first written to if that is not known.
 * @param {Run} run
 */
function startOf(run) {
  const starts = run.profiles.map(({ created }) => Date.parse(created ?? "") / 1000).filter((start) => start > 0);
  return Math.min(...(starts.length ? starts : run.profiles.map((profile) => profile.wall_time)));
}

/**
 * @param {Profile[]} windows
 * @param {string | undefined} tag
 */
function windowBefore(windows, tag) {
  return windows[windows.findIndex((window) => window.tag === tag) - 1]?.tag;
}

/**
 * The newest run, of several of one time the last.
 * @param {Run[]} runs
 * @param {(run: Run) => number} timeOf
 * @returns {Run | undefined}
 */
function newestRun(runs, timeOf) {
  return runs.reduce(
    (best, run) => (best === undefined || timeOf(run) >= timeOf(best) ? run : best),
    /** @type {Run | undefined} */ (undefined),
  );
}

/**
 * The wanted one, else the newest: of a fit, if there is one, since the validation after it is shorter.
 * @param {Profile[]} profiles
 * @param {string} tag
 * @returns {Profile | undefined}
 */
function nearest(profiles, tag) {
  const fits = profiles.filter(({ loop }) => loop === "fit");
  return profiles.find((profile) => profile.tag === tag) ?? (fits.length ? fits : profiles).at(-1);
}
