// Shows one view of the chosen profile, or two profiles side by side.

import { BEFORE, isTurnedRound } from "./choice.js";
import { make } from "./dom.js";
import { draw } from "./drawings.js";
import { makeChoosers } from "./menu.js";
import { showParts } from "./parts.js";
import { askJson } from "./server.js";

/** @typedef {import("./link.js").Choice} Choice */
/** @typedef {import("./server.js").Contents} Contents */
/** @typedef {import("./server.js").ViewAnswer} ViewAnswer */

export const COMPARE = "compare";

const SELECTED = ["run", "profile", "window", "rank"];

/**
 * Why a run has nothing that can be shown.
 * @param {Choice} choice
 * @param {Contents} contents
 */
function whyNothing(choice, contents) {
  const run = contents.runs.find(({ name }) => name === choice.run);
  return `No profile of ${choice.run} can be read. ${run?.profiles[0]?.problem ?? ""}`;
}

/** @param {unknown} error */
function problem(error) {
  return make("p", { class: "problem", role: "alert" }, error instanceof Error ? error.message : String(error));
}

export class ViewPage {
  /**
   * @param {HTMLElement} main
   * @param {(changes: Choice) => void} choose the reader wants to see something else
   * @param {(looks: Choice) => void} remember the reader has looked around in what is shown
   */
  constructor(main, choose, remember) {
    this.main = main;
    this.choose = choose;
    this.remember = remember;
    this.number = 0; // of the view that is wanted: an answer to an earlier question comes too late
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
    const remember = (/** @type {Choice} */ looks) => isWanted() && this.remember(looks);
    this.main.setAttribute("aria-busy", "true");
    try {
      if (!choice.profile && !choice.window) throw new Error(whyNothing(choice, contents));
      const answer = await this.ask(choice);
      if (!isWanted()) return;
      this.clear();
      const title = make("h1", {}, answer.title);
      const parts = make("div", { class: "parts" });
      const places = (answer.columns ?? []).map(() => make("div", { class: "drawing" }));
      const headed = places.flatMap((place, number) => this.withRank(place, answer.columns ?? [], number));
      if (choice.view === COMPARE) this.main.append(title, this.makeSides(choice, contents), parts);
      else this.main.append(title, ...headed, parts);
      showParts(parts, answer.html, choice, remember);
      if (!answer.html && !places.length) parts.append(make("p", { class: "empty" }, answer.empty));
      await Promise.all(
        (answer.columns ?? []).map(async (columns, place) => {
          try {
            const drawing = await draw(places[place], columns, answer.words, choice, remember, isWanted);
            if (drawing) this.drawings.push(drawing);
          } catch (error) {
            places[place].replaceChildren(problem(error)); // the rest of the view is good
          }
        }),
      );
    } catch (error) {
      if (!isWanted()) return;
      this.clear();
      if (choice.view === COMPARE) this.main.append(this.makeSides(choice, contents));
      this.main.append(problem(error));
    } finally {
      if (isWanted()) this.main.removeAttribute("aria-busy");
    }
  }

  /**
   * A drawing, under the number of its rank where there are several.
   * @param {HTMLElement} place
   * @param {{rank: number | null}[]} columns
   * @param {number} number
   * @returns {HTMLElement[]}
   */
  withRank(place, columns, number) {
    return columns.length > 1 ? [make("h2", {}, `Rank ${columns[number].rank}`), place] : [place];
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
   * What is compared: before here, after in the bar at the side.
   * @param {Choice} choice
   * @param {Contents} contents
   */
  makeSides(choice, contents) {
    const before = makeChoosers(choice, contents, BEFORE, this.choose);
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
      make(
        "p",
        {},
        "After: what is chosen at the left. ",
        isTurnedRound(choice, contents) ? "Before is the newer of the two; Swap turns them round." : "",
      ),
      make("button", { type: "button", onclick: swap }, "Swap"),
    );
  }

  clear() {
    for (const drawing of this.drawings) drawing.destroy();
    this.drawings = [];
    this.main.replaceChildren();
  }
}
