// Every definition on one page, with a search.

import { make } from "./dom.js";

/** A dialog over the page. */
export class HelpPage {
  /** @param {import("./html/help/help.js").Definitions} definitions */
  constructor(definitions) {
    this.definitions = definitions;
    /** @type {HTMLElement | null} */
    this.from = null;
    this.search = make("input", { type: "search", autocomplete: "off", spellcheck: "false", oninput: () => this.#find() });
    this.found = make("output");
    this.body = make("div", { class: "help-body", tabindex: "0", role: "region", "aria-label": "Definitions" });
    const close = make("button", { type: "button", class: "help-close", "aria-label": "Close", onclick: () => this.element.close() }, "×");
    this.element = make(
      "dialog",
      { class: "help-page", "aria-label": "All definitions" },
      make("header", {}, make("h2", {}, "All definitions"), make("label", {}, "Search ", this.search), this.found, close),
      this.body,
    );
    this.element.addEventListener("close", () => this.from?.focus());
    this.element.addEventListener("click", (event) => event.target === this.element && this.element.close()); // beside it
  }

  /**
   * @param {string} anchor of the section to begin at
   * @param {HTMLElement | null} from gets the focus back
   */
  open(anchor, from) {
    this.from = from;
    if (!this.element.isConnected) document.body.append(this.element);
    if (!this.body.hasChildNodes()) this.#fill();
    this.search.value = "";
    this.#find();
    this.element.showModal();
    const section = /** @type {HTMLElement[]} */ ([...this.body.children]).find((one) => one.dataset.anchor === anchor);
    section?.scrollIntoView();
    this.search.focus({ preventScroll: true });
  }

  #fill() {
    for (const [anchor, { heading, html }] of Object.entries(this.definitions.sections)) {
      if (anchor.includes("#")) continue; // a part of a section
      const text = make("div", { class: "help-text" });
      text.innerHTML = html;
      this.body.append(make("section", { "data-anchor": anchor }, make("h3", {}, heading ?? ""), text));
    }
  }

  #find() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const section of /** @type {HTMLElement[]} */ ([...this.body.children])) {
      const text = (section.textContent ?? "").toLowerCase();
      section.hidden = !words.every((word) => text.includes(word));
      if (!section.hidden) count += 1;
    }
    this.found.textContent = words.length ? `${count} ${count === 1 ? "section" : "sections"}` : "";
    mark(this.body, words);
    if (words.length) this.body.scrollTop = 0;
  }
}

/**
 * Mark words where the browser can, without touching the text.
 * @param {HTMLElement} root
 * @param {string[]} words
 */
function mark(root, words) {
  if (!("highlights" in CSS)) return;
  CSS.highlights.delete("help-found");
  const ranges = [];
  const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node = texts.nextNode(); node && words.length; node = texts.nextNode()) {
    const text = (node.nodeValue ?? "").toLowerCase();
    for (const word of words) {
      for (let place = text.indexOf(word); place >= 0; place = text.indexOf(word, place + word.length)) {
        const range = new Range();
        range.setStart(node, place);
        range.setEnd(node, place + word.length);
        ranges.push(range);
      }
    }
  }
  if (ranges.length) CSS.highlights.set("help-found", new Highlight(...ranges));
}
