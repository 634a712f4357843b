// Shows one view of the selected profile, or two profiles side by side.

import { BEFORE, COMPARE, traceOf } from "./choice.js";
import { keepFocus, make } from "./dom.js";
import { draw, drawnTogether } from "./drawings.js";
import { makeChoosers } from "./menu.js";
import { showParts } from "./parts.js";
import { askJson } from "./server.js";

/** @typedef {import("./link.js").Choice} Choice */
/** @typedef {import("./server.js").Contents} Contents */
/** @typedef {import("./server.js").ViewAnswer} ViewAnswer */

const PATIENCE_MS = 150; // how long the previous view stays until the next one arrives

const SELECTED = ["run", "profile", "window", "rank"];

/**
 * Why a run has nothing to show.
 * @param {Choice} choice
 * @param {Contents} contents
 */
function whyNothing(choice, contents) {
  const run = contents.runs.find(({ name }) => name === choice.run);
  return `Can't read any profile of ${choice.run}. ${run?.profiles[0]?.problem ?? ""}`;
}

/** @param {unknown} error */
function problem(error) {
  return make("p", { class: "problem", role: "alert" }, error instanceof Error ? error.message : String(error));
}

/** @param {string} text */
function heading(text) {
  return make("h1", { tabindex: "-1", "data-key": "heading" }, text);
}

/**
 * Placeholder of a view until it arrives.
 * @param {string} title
 * @param {HTMLElement[]} above parts that are already usable
 */
export function skeleton(title, above = []) {
  const bones = Array.from({ length: 4 }, () => make("div", { class: "bone" }));
  const status = make("p", { class: "waiting", role: "status" }, "Loading…");
  return [heading(title), ...above, status, make("div", { class: "skeleton", "aria-hidden": "true" }, ...bones)];
}

export class ViewPage {
  /**
   * @param {HTMLElement} main
   * @param {(changes: Choice) => void} choose the reader selects something else
   * @param {(looks: Choice) => void} remember the reader has changed settings of the current view
   */
  constructor(main, choose, remember) {
    this.main = main;
    this.choose = choose;
    this.remember = remember;
    this.number = 0; // of the wanted view: answers to earlier requests are ignored
    /** @type {{destroy: () => void}[]} */
    this.drawings = [];
  }

  /**
   * @param {Choice} choice complete
   * @param {Contents} contents
   */
  async show(choice, contents) {
    this.number += 1;
    const number = this.number;
    const isWanted = () => number === this.number;
    const name = contents.views.find(({ key }) => key === choice.view)?.title ?? "";
    const sides = () => (choice.view === COMPARE ? [this.makeSides(choice, contents)] : []);
    this.main.setAttribute("aria-busy", "true");
    const late = setTimeout(() => isWanted() && this.lay(...skeleton(name, sides())), PATIENCE_MS);
    try {
      if (!choice.profile && !choice.window) throw new Error(whyNothing(choice, contents));
      const answer = await this.ask(choice).finally(() => clearTimeout(late));
      const goto = (/** @type {number} */ step) => traceOf(choice, contents, step);
      if (isWanted()) await this.showAnswer(answer, choice, [heading(name), ...sides()], goto, isWanted);
    } catch (error) {
      clearTimeout(late);
      if (isWanted()) this.lay(heading(name), ...sides(), problem(error));
    } finally {
      if (isWanted()) this.main.removeAttribute("aria-busy");
    }
  }

  /**
   * @param {ViewAnswer} answer
   * @param {Choice} choice
   * @param {HTMLElement[]} above
   * @param {(step: number) => object | null} goto where a step's trace is
   * @param {() => boolean} isWanted whether the reader is still waiting for it
   */
  async showAnswer({ columns = [], documents, empty, words }, choice, above, goto, isWanted) {
    const parts = make("div", { class: "parts" });
    const drawings = drawnTogether(columns);
    const places = drawings.map(() => make("div", { class: "drawing" }));
    this.lay(...above, ...places.flatMap((place, number) => this.withRank(place, drawings, number)), parts);
    const remember = (/** @type {Choice} */ looks) => isWanted() && this.remember(looks);
    showParts(parts, documents, choice, remember);
    if (!documents.length && !places.length) parts.append(make("p", { class: "empty" }, empty));
    const drawn = drawings.map(async (one, place) => {
      try {
        const drawing = await draw(places[place], one, { words, goto }, choice, remember, isWanted);
        if (drawing) this.drawings.push(drawing);
      } catch (error) {
        places[place].replaceChildren(problem(error)); // the rest of the view is fine
      }
    });
    await Promise.all(drawn);
  }

  /**
   * A drawing, under its rank's number if there are multiple.
   * @param {HTMLElement} place
   * @param {{rank: number | null}[][]} drawings
   * @param {number} number
   * @returns {HTMLElement[]}
   */
  withRank(place, drawings, number) {
    return drawings.length > 1 ? [make("h2", {}, `Rank ${drawings[number][0].rank}`), place] : [place];
  }

  /**
   * @param {Choice} choice
   * @returns {Promise<ViewAnswer>}
   */
  ask(choice) {
    const sides = choice.view === COMPARE ? ["", BEFORE] : [""];
    const names = sides.flatMap((prefix) => SELECTED.map((name) => prefix + name));
    const parameters = Object.fromEntries(names.map((name) => [name, choice[name] ?? ""]));
    return choice.view === COMPARE
      ? askJson("compare", parameters)
      : askJson("view", { view: choice.view, ...parameters });
  }

  /**
   * The compared profiles: "before" is selected here, "after" in the sidebar.
   * @param {Choice} choice
   * @param {Contents} contents
   */
  makeSides(choice, contents) {
    const before = makeChoosers(choice, contents, BEFORE, this.choose, this.remember);
    const swap = () => {
      const changes = /** @type {Choice} */ ({});
      for (const name of SELECTED) {
        changes[name] = choice[BEFORE + name] ?? "";
        changes[BEFORE + name] = choice[name] ?? "";
      }
      this.choose(changes);
    };
    return make(
      "div",
      { class: "sides" },
      make("fieldset", {}, make("legend", {}, "Before"), ...before),
      make("p", {}, "After: the run selected on the left."),
      make("button", { type: "button", "data-key": "swap", onclick: swap }, "Swap"),
    );
  }

  /**
   * Replace the content without losing the keyboard focus.
   * @param {HTMLElement[]} shown heading first
   */
  lay(...shown) {
    keepFocus(this.main, () => {
      for (const drawing of this.drawings) drawing.destroy();
      this.drawings = [];
      this.main.replaceChildren(...shown);
      return shown[0];
    });
  }
}
