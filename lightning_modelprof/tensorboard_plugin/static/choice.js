// From the address to what is shown: a missing or outdated choice becomes the nearest sensible one.

/** @typedef {import("./link.js").Choice} Choice */
/** @typedef {import("./server.js").Contents} Contents */
/** @typedef {import("./server.js").Profile} Profile */
/** @typedef {import("./server.js").Run} Run */

/** Prefix in the address of the side to compare with. */
export const BEFORE = "before_";

/** The view that shows two choices side by side. */
export const COMPARE = "compare";

/**
 * Whether two choices are equal, regardless of the order of names and of names without a value.
 * @param {Choice} one
 * @param {Choice} other
 */
export function isSame(one, other) {
  return [...new Set([...Object.keys(one), ...Object.keys(other)])].every(
    (name) => (one[name] ?? "") === (other[name] ?? ""),
  );
}

/** A link's target in a view. The next choice drops it unless it has its own target. */
const POINTERS = ["find", "row"];

/** The reader's settings of a part → the choices they belong to. The sort order always stays. */
const LOOKS = {
  at_steps: ["run", "profile"],
  at_time: ["run", "window", "rank"],
  at_flames: ["run", "profile", "window", "rank"],
};

/**
 * The choice after the reader has selected something else.
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
  if (next.find) delete next.at_time; // show the match
  return next;
}

/**
 * The choice after the reader has changed settings of a part.
 * @param {Choice} choice
 * @param {Choice} looks
 */
export function lookedAt(choice, looks) {
  const next = { ...choice, ...looks };
  if ("at_time" in looks) delete next.find; // the reader has moved on from the match
  return next;
}

/**
 * A run's profiles of one kind, newest last.
 * @param {Run | undefined} run
 * @param {"run" | "window"} kind
 */
export function profilesOf(run, kind) {
  return run?.profiles.filter((profile) => profile.kind === kind) ?? [];
}

/**
 * Windows that belong to a loop: those whose tag starts like the run's.
 * @param {Run | undefined} run
 * @param {string} profile tag of the selected loop; "" for all
 */
export function windowsOf(run, profile) {
  const folder = profile.slice(0, profile.lastIndexOf("/") + 1);
  const windows = profilesOf(run, "window");
  return profile === "" ? windows : windows.filter(({ tag }) => tag.slice(0, tag.lastIndexOf("/") + 1) === folder);
}

/**
 * Where a step's trace is: in the selected window if that contains it, else in the newest one that does.
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
 * Missing things that a link names; "" if everything exists.
 * @param {Choice} wanted as in the link
 * @param {Choice} shown complete
 */
export function whatIsGone(wanted, shown) {
  const gone = ["run", "profile", "window"].filter((name) => wanted[name] && wanted[name] !== shown[name]);
  return gone.length ? `This link's ${gone[0]} ${wanted[gone[0]]} no longer exists.` : "";
}

/**
 * The same choice with missing parts added and outdated ones replaced.
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
 * The choice without the side to compare with, if that's the dashboard's own proposal: then it follows the reader's
 * selection.
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
 * The default run to show is the one written to last. To compare with: the same run if its window has one before it,
 * else the newest of those that started before it, preferably of the same model.
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
 * When a run was last written to.
 * @param {Run} run
 */
function writtenAt(run) {
  return Math.max(...run.profiles.map((profile) => profile.wall_time));
}

/**
 * When a run started, in seconds since 1970; if unknown, when it was first written to.
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
 * The newest run; for equal times, the last one.
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
 * The wanted one, else the newest, preferably of a fit, because the validation after it is shorter.
 * @param {Profile[]} profiles
 * @param {string} tag
 * @returns {Profile | undefined}
 */
function nearest(profiles, tag) {
  const fits = profiles.filter(({ loop }) => loop === "fit");
  return profiles.find((profile) => profile.tag === tag) ?? (fits.length ? fits : profiles).at(-1);
}
