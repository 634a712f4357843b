// The sidebar: run, window, rank and view.

import { profilesOf, windowsOf } from "./choice.js";
import { chooser, make } from "./dom.js";

const MANY_RUNS = 10; // a longer list gets a filter

/** @typedef {import("./link.js").Choice} Choice */
/** @typedef {import("./server.js").Contents} Contents */
/** @typedef {import("./server.js").Profile} Profile */

/**
 * Lists for selecting a run, a loop, a window and a rank; lists of one are left out.
 * @param {Choice} choice complete
 * @param {Contents} contents
 * @param {string} prefix of the names: "" or BEFORE
 * @param {(changes: Choice) => void} change
 * @param {(looks: Choice) => void} remember for changes that don't affect the selection
 * @returns {HTMLElement[]}
 */
export function makeChoosers(choice, contents, prefix, change, remember) {
  const run = contents.runs.find(({ name }) => name === choice[`${prefix}run`]);
  const loops = profilesOf(run, "run");
  const windows = windowsOf(run, choice[`${prefix}profile`]);
  const shown = [...windows, ...loops].find(
    ({ tag }) => tag === (choice[`${prefix}window`] || choice[`${prefix}profile`]),
  );
  const ranks = (shown?.ranks ?? []).map((rank) => ({ value: String(rank), text: `rank ${rank}` }));
  const lists = [
    { label: "Run", name: "run", options: contents.runs.map(({ name }) => ({ value: name, text: name })) },
    { label: "Loop", name: "profile", options: loops.map((one) => option(one, loopName(one))) },
    { label: "Window", name: "window", options: windows.map((one) => option(one, `${one.window}: ${one.label}`)) },
    { label: "Rank", name: "rank", options: ranks.length ? [{ value: "", text: "all" }, ...ranks] : [] },
  ];
  return lists
    .filter(({ name, options }) => options.length > (name === "profile" ? 1 : 0))
    .flatMap(({ label, name, options }) => {
      const choose = (/** @type {string} */ value) => change({ [prefix + name]: value });
      const list = chooser(label, options, choice[prefix + name], prefix + name, choose);
      if (name !== "run" || options.length <= MANY_RUNS) return [list];
      return [filterOf(list, choice, `${prefix}filter`, choose, remember), list];
    });
}

/**
 * A field whose words reduce the runs in the list below. The selected run stays.
 * @param {HTMLElement} list a chooser
 * @param {Choice} choice
 * @param {string} name of the filter in the address
 * @param {(run: string) => void} choose
 * @param {(looks: Choice) => void} remember
 */
function filterOf(list, choice, name, choose, remember) {
  const select = /** @type {HTMLSelectElement} */ (list.querySelector("select"));
  const options = Array.from(select.options);
  const chosen = select.value;
  const count = make("output");
  const filter = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = options.filter(({ value }) => words.every((word) => value.toLowerCase().includes(word)));
    select.replaceChildren(...options.filter((option) => found.includes(option) || option.value === chosen));
    select.value = chosen;
    count.textContent = words.length ? `${found.length} of ${options.length}` : `${options.length} runs`;
    return found;
  };
  const field = make("input", {
    type: "search",
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "filter by name",
    "data-key": name,
    value: choice[name] ?? "",
    oninput: () => {
      filter();
      remember({ [name]: field.value });
    },
    onkeydown: (event) => {
      const { key } = /** @type {KeyboardEvent} */ (event);
      const found = key === "Enter" && field.value.trim() ? filter() : [];
      if (found.length) choose(found[0].value);
      if (key === "ArrowDown") {
        event.preventDefault();
        select.focus();
      }
    },
  });
  filter();
  return make("label", { class: "chooser filter" }, make("span", {}, "Find a run ", count), field);
}

/**
 * @param {Profile} profile
 * @param {string} text
 */
function option(profile, text) {
  return { value: profile.tag, text };
}

/** @param {Profile} profile */
function loopName(profile) {
  const folder = profile.tag.split("/")[0]; // a second fit with the same logger has its own folder
  return `${profile.loop}: ${profile.label}${folder === "modelprof" ? "" : ` (${folder})`}`;
}

/**
 * A run's unreadable profiles, and why.
 * @param {Choice} choice
 * @param {Contents} contents
 * @returns {HTMLElement[]}
 */
export function makeProblems(choice, contents) {
  const run = contents.runs.find(({ name }) => name === choice.run);
  const broken = run?.profiles.filter(({ problem }) => problem) ?? [];
  return broken.map(({ tag, problem }) => make("p", { class: "problem", role: "status" }, `${tag}: ${problem}`));
}

/** Keys that select a view by its place: the digits, and the key next to them. */
const KEYS = "1234567890-";

/**
 * The list of views.
 * @param {Contents} contents
 * @param {string} shown key of the current view
 * @param {(key: string) => void} choose
 */
export function makeViewList(contents, shown, choose) {
  const items = contents.views.map(({ key, title }, place) => {
    const hint = place < KEYS.length ? `${title} (key ${KEYS[place]})` : title;
    const onclick = () => choose(key);
    const button = make("button", { type: "button", title: hint, "data-key": `view ${key}`, onclick }, title);
    if (key === shown) button.setAttribute("aria-current", "page");
    return make("li", {}, button);
  });
  return make("nav", { "aria-label": "Views" }, make("ul", {}, ...items));
}

/**
 * Digits and the key next to them select a view, unless the reader is typing or a part of the view uses the key.
 * @param {Contents} contents
 * @param {(key: string) => void} choose
 */
export function listenToDigits(contents, choose) {
  document.addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey || target.closest("input, select, textarea")) return;
    const place = event.key.length === 1 ? KEYS.indexOf(event.key) : -1;
    if (place >= 0 && place < contents.views.length) choose(contents.views[place].key);
  });
}
