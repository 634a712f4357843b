// The dashboard. TensorBoard imports this module into its own frame and calls render().

import { BEFORE, COMPARE, chosen, complete, isSame, lookedAt, whatIsGone, withoutUsualBefore } from "./choice.js";
import { keepFocus, make } from "./dom.js";
import { onGoto, onLinkChange, readLink, writeLink } from "./link.js";
import { listenToDigits, makeChoosers, makeProblems, makeViewList } from "./menu.js";
import { askJson } from "./server.js";
import { followTheme } from "./theme.js";
import { skeleton, ViewPage } from "./views.js";

/** @typedef {import("./link.js").Choice} Choice */
/** @typedef {import("./server.js").Contents} Contents */

class Dashboard {
  /** @param {Contents} contents */
  constructor(contents) {
    this.contents = contents;
    this.menu = make("aside", { "aria-label": "Selection" });
    this.main = make("main", { tabindex: "-1" });
    const choose = (/** @type {Choice} */ changes) => this.choose(changes);
    this.page = new ViewPage(this.main, choose, (looks) => this.remember(looks));
    document.body.replaceChildren(this.menu, this.main);
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
    const isOfBefore = Object.keys(changes).some((name) => name.startsWith(BEFORE));
    const choice = isOfBefore ? this.choice : withoutUsualBefore(this.choice, this.contents);
    return chosen(choice, changes, (one) => this.completed(one));
  }

  /**
   * The reader selects something else, which adds an entry to the browser's history.
   * @param {Choice} changes
   */
  choose(changes) {
    this.show(this.after(changes), "", true);
  }

  /**
   * The reader has changed settings of the current view.
   * @param {Choice} looks
   */
  remember(looks) {
    this.choice = lookedAt(this.choice, looks);
    writeLink(this.choice, false);
  }

  /**
   * @param {Choice} choice complete
   * @param {string} gone missing things that a link names
   * @param {boolean} isStep whether going back leads to the current choice
   */
  show(choice, gone, isStep) {
    this.choice = choice;
    writeLink(choice, isStep);
    const choose = (/** @type {Choice} */ changes) => this.choose(changes);
    keepFocus(this.menu, () => {
      this.menu.replaceChildren(
        ...makeChoosers(choice, this.contents, "", choose, (looks) => this.remember(looks)),
        makeViewList(this.contents, choice.view, (view) => choose({ view })),
        ...(gone ? [make("p", { class: "problem", role: "status" }, gone)] : []),
        ...makeProblems(choice, this.contents),
      );
      return this.menu.querySelector("button") ?? undefined;
    });
    this.page.show(choice, this.contents);
  }
}

/** Load these first, because drawings read their colors from the styles. */
function loadStyles() {
  const link = make("link", { rel: "stylesheet", href: "./static/page.css" });
  const settled = new Promise((resolve) => {
    link.addEventListener("load", resolve);
    link.addEventListener("error", resolve);
  });
  document.head.append(link);
  return settled;
}

/**
 * A page without a menu.
 * @param {(Node | string)[][]} lines
 */
function showAlone(...lines) {
  const paragraphs = lines.map((line) => make("p", {}, ...line));
  document.body.replaceChildren(make("main", {}, make("h1", {}, "Model Profile"), ...paragraphs));
}

/** Called by TensorBoard. */
export async function render() {
  document.title = "Model Profile"; // TensorBoard's page around this one sets neither
  document.documentElement.lang = "en";
  followTheme();
  const asked = askJson("profiles").then(
    (contents) => ({ contents: /** @type {Contents} */ (contents), error: undefined }),
    (error) => ({ contents: undefined, error }),
  );
  await loadStyles();
  document.body.replaceChildren(make("aside"), make("main", { "aria-busy": "true" }, ...skeleton("Model Profile")));
  const { contents, error } = await asked;
  if (!contents) {
    showAlone([error instanceof Error ? error.message : String(error)]);
  } else if (!contents.runs.length) {
    showAlone(...NOTHING.map((line) => line.map((part, place) => (place % 2 ? make("code", {}, part) : part))));
  } else {
    contents.views.push({ key: COMPARE, title: "Compare" });
    new Dashboard(contents);
  }
}

// Every other part of a line is code.
const NOTHING = [
  ["No profiles in this log directory yet."],
  [
    "Train with ",
    "Trainer(callbacks=[ModelProfCallback(active=10)])",
    " and a TensorBoardLogger. The first profile appears when the first window has closed. TensorBoard reads new files" +
      " every few seconds; then reload this page.",
  ],
  [
    "To view a saved run or torch.profiler traces: ",
    "lightning-modelprof tensorboard PATH --logdir LOGDIR",
    ".",
  ],
];
