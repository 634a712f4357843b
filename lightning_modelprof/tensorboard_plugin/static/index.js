// The dashboard. TensorBoard imports this module into a frame of its own and calls render().

import { BEFORE, complete, whatIsGone } from "./choice.js";
import { make } from "./dom.js";
import { onLinkChange, readLink, writeLink } from "./link.js";
import { listenToDigits, makeChoosers, makeProblems, makeViewList } from "./menu.js";
import { askJson } from "./server.js";
import { followTheme } from "./theme.js";
import { COMPARE, ViewPage } from "./views.js";

/** @typedef {import("./link.js").Choice} Choice */
/** @typedef {import("./server.js").Contents} Contents */

const STYLES = ["html/parts.css", "vendor/uplot/uPlot.min.css", "steps/steps.css", "timeline.css", "help.css"];
const AT = ["at_steps", "at_time"]; // what the reader looks at in a drawing belongs to that drawing alone

class Dashboard {
  /** @param {Contents} contents */
  constructor(contents) {
    this.contents = contents;
    this.choice = this.completed(readLink());
    this.gone = whatIsGone(readLink(), this.choice);
    this.menu = make("aside", { "aria-label": "What is shown" });
    this.main = make("main", { tabindex: "-1" });
    this.page = new ViewPage(this.main, (changes, isNew) => this.change(changes, isNew));
    document.body.append(this.menu, this.main);
    listenToDigits(contents, (view) => this.change({ view }, true));
    onLinkChange(() => {
      const choice = this.completed(readLink());
      if (JSON.stringify(choice) === JSON.stringify(this.choice)) return;
      this.choice = choice;
      this.gone = whatIsGone(readLink(), choice);
      this.show();
    });
    this.show();
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
   * @param {boolean} isNew whether something else is to be shown
   */
  change(changes, isNew) {
    const kept = { ...this.choice, ...changes };
    if (isNew && !("view" in changes)) for (const name of AT) delete kept[name];
    this.choice = isNew ? this.completed(kept) : kept;
    this.gone = "";
    if (isNew) this.show();
    else writeLink(this.choice);
  }

  show() {
    writeLink(this.choice);
    const change = (/** @type {Choice} */ changes) => this.change(changes, true);
    this.menu.replaceChildren(
      ...makeChoosers(this.choice, this.contents, "", change),
      makeViewList(this.contents, this.choice.view, (view) => change({ view })),
      ...(this.gone ? [make("p", { class: "problem", role: "status" }, this.gone)] : []),
      ...makeProblems(this.choice, this.contents),
    );
    this.page.show(this.choice, this.contents);
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
