// The dashboard. TensorBoard imports this module into a frame of its own and calls render().

import { BEFORE, chosen, complete, isSame, lookedAt, whatIsGone } from "./choice.js";
import { make } from "./dom.js";
import { onGoto, onLinkChange, readLink, writeLink } from "./link.js";
import { listenToDigits, makeChoosers, makeProblems, makeViewList } from "./menu.js";
import { askJson } from "./server.js";
import { followTheme } from "./theme.js";
import { COMPARE, ViewPage } from "./views.js";

/** @typedef {import("./link.js").Choice} Choice */
/** @typedef {import("./server.js").Contents} Contents */

const STYLES = ["html/parts.css", "vendor/uplot/uPlot.min.css", "steps/steps.css", "timeline.css", "help.css"];

class Dashboard {
  /** @param {Contents} contents */
  constructor(contents) {
    this.contents = contents;
    this.menu = make("aside", { "aria-label": "What is shown" });
    this.main = make("main", { tabindex: "-1" });
    const choose = (/** @type {Choice} */ changes) => this.choose(changes);
    this.page = new ViewPage(this.main, choose, (looks) => this.remember(looks));
    document.body.append(this.menu, this.main);
    listenToDigits(contents, (view) => this.choose({ view }));
    onGoto((changes) => this.after(changes), choose);
    onLinkChange(() => {
      const choice = this.completed(readLink());
      if (!isSame(choice, this.choice)) this.show(choice, whatIsGone(readLink(), choice), false);
    });
    this.choice = this.completed(readLink());
    this.show(this.choice, whatIsGone(readLink(), this.choice), false);
  }

  /**
   * @param {Choice} choice
   * @returns {Choice}
   */
  completed(choice) {
    const known = this.contents.views.some(({ key }) => key === choice.view);
    const complete_ = complete({ ...choice, view: known ? choice.view : this.contents.views[0].key }, this.contents);
    return complete_.view === COMPARE ? complete(complete_, this.contents, BEFORE) : complete_;
  }

  /**
   * @param {Choice} changes
   * @returns {Choice}
   */
  after(changes) {
    return chosen(this.choice, changes, (choice) => this.completed(choice));
  }

  /**
   * The reader wants to see something else: a step that the browser goes back.
   * @param {Choice} changes
   */
  choose(changes) {
    this.show(this.after(changes), "", true);
  }

  /**
   * The reader has looked around in what is shown.
   * @param {Choice} looks
   */
  remember(looks) {
    this.choice = lookedAt(this.choice, looks);
    writeLink(this.choice, false);
  }

  /**
   * @param {Choice} choice complete
   * @param {string} gone what a link names that is not here
   * @param {boolean} isStep whether going back leads to what is shown now
   */
  show(choice, gone, isStep) {
    this.choice = choice;
    writeLink(choice, isStep);
    const choose = (/** @type {Choice} */ changes) => this.choose(changes);
    this.menu.replaceChildren(
      ...makeChoosers(choice, this.contents, "", choose),
      makeViewList(this.contents, choice.view, (view) => choose({ view })),
      ...(gone ? [make("p", { class: "problem", role: "status" }, gone)] : []),
      ...makeProblems(choice, this.contents),
    );
    this.page.show(choice, this.contents);
  }
}

/**
 * Drawings read their colours from the styles, so these come first.
 * @param {string} name
 * @returns {Promise<unknown>}
 */
function loadStyle(name) {
  const link = make("link", { rel: "stylesheet", href: `./static/${name}` });
  const settled = new Promise((resolve) => {
    link.addEventListener("load", resolve);
    link.addEventListener("error", resolve);
  });
  document.head.append(link);
  return settled;
}

/** @param {string} text */
function showEmpty(text) {
  const lines = text.split("\n").map((line) => make("p", {}, line));
  document.body.append(make("main", {}, make("h1", {}, "Model Profile"), ...lines));
}

/** Called by TensorBoard. */
export async function render() {
  followTheme();
  await Promise.all([...STYLES, "dashboard.css"].map(loadStyle));
  try {
    const contents = /** @type {Contents} */ (await askJson("profiles"));
    contents.views.push({ key: COMPARE, title: "Compare" });
    if (contents.runs.length) new Dashboard(contents);
    else showEmpty(NOTHING);
  } catch (error) {
    showEmpty(error instanceof Error ? error.message : String(error));
  }
}

const NOTHING = `There is no profile in this log directory yet.
Train with Trainer(callbacks=[ModelProfCallback(active=10)]) and a TensorBoardLogger: the profile is here when the first
window has closed. TensorBoard reads new files every some seconds; then reload this page.
To look at a saved run or at traces of torch.profiler: lightning-modelprof tensorboard PATH --logdir LOGDIR.`;
