// The card with one definition, beside its figure.

import { make } from "../make.js";

/** @typedef {import("./help.js").Definitions} Definitions */
/** @typedef {import("./help.js").Topic} Topic */
/** @typedef {import("./help.js").ShowAll} ShowAll */

const LEAVE_MS = 250;
const MARGIN = 8; // pixels between the card and the edge of the page
let numCards = 0;

/** One card for all figures: what it means, where else to look. */
export class HelpCard {
  /** @type {WeakMap<Definitions, HelpCard>} */
  static #known = new WeakMap();

  /**
   * @param {Definitions} definitions
   * @param {ShowAll} [showAll]
   */
  static of(definitions, showAll) {
    const card = HelpCard.#known.get(definitions) ?? new HelpCard(definitions, showAll);
    HelpCard.#known.set(definitions, card);
    return card;
  }

  /**
   * @param {Definitions} definitions
   * @param {ShowAll} [showAll]
   */
  constructor(definitions, showAll) {
    this.definitions = definitions;
    this.page = showAll;
    this.isHovering = false;
    this.timer = 0;
    this.anchor = "";
    /** @type {HTMLElement | null} */
    this.from = null;
    const id = `help-heading-${numCards++}`;
    this.heading = make("h3", { id });
    this.text = make("div", { class: "help-text", tabindex: "0", role: "group", "aria-labelledby": id });
    this.topics = make("div", { class: "help-topics", role: "group", "aria-label": "Figures in this table" });
    const close = make("button", { type: "button", class: "help-close", "aria-label": "Close", onclick: () => this.close() }, "×");
    const more = make("button", { type: "button", class: "help-more", onclick: () => this.showAll() }, "All definitions");
    this.element = make(
      "div",
      { popover: "auto", class: "help-card", role: "dialog", "aria-labelledby": id, tabindex: "-1" },
      make("header", {}, this.heading, close),
      this.text,
      this.topics,
      ...(showAll ? [make("footer", {}, more)] : []),
    );
    this.element.addEventListener("pointerenter", () => clearTimeout(this.timer));
    this.element.addEventListener("pointerleave", () => this.leave());
    this.element.addEventListener("pointerdown", () => (this.isHovering = false)); // the reader means to stay
    this.element.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      this.close();
    });
    document.addEventListener("scroll", () => this.isHovering && this.element.hidePopover(), { capture: true, passive: true });
  }

  get isOpen() {
    return this.element.isConnected && this.element.matches(":popover-open");
  }

  /**
   * Open at a figure, with the focus in the card.
   * @param {HTMLElement} from gets the focus back
   * @param {Topic} topic
   * @param {Topic[]} topics
   */
  open(from, topic, topics = []) {
    this.#show(from, topic, topics);
    this.isHovering = false;
    this.element.focus();
  }

  /**
   * Open beside a figure that the pointer rests on, until it leaves.
   * @param {HTMLElement} from
   * @param {Topic} topic
   */
  hover(from, topic) {
    if (!from.isConnected || (this.isOpen && !this.isHovering)) return;
    this.#show(from, topic, []);
    this.isHovering = true;
  }

  leave() {
    clearTimeout(this.timer);
    if (this.isHovering) this.timer = window.setTimeout(() => this.isHovering && this.element.hidePopover(), LEAVE_MS);
  }

  close() {
    this.element.hidePopover();
    this.from?.focus();
  }

  showAll() {
    this.element.hidePopover();
    this.page?.(this.anchor.split("#")[0], this.from);
  }

  /**
   * @param {HTMLElement} from
   * @param {Topic} topic
   * @param {Topic[]} topics
   */
  #show(from, topic, topics) {
    clearTimeout(this.timer);
    if (!this.element.isConnected) document.body.append(this.element);
    this.from = from;
    this.#fill(topic);
    this.topics.replaceChildren(
      ...topics.map((one) => make("button", { type: "button", onclick: () => this.#fill(one) }, one.label)),
    );
    this.topics.hidden = topics.length === 0;
    this.element.classList.toggle("is-brief", topic.anchor.includes("#")); // a term, not a section
    if (!this.isOpen) this.element.showPopover();
    this.#place(from.getBoundingClientRect());
  }

  /** @param {Topic} topic */
  #fill({ label, anchor }) {
    this.anchor = anchor;
    this.heading.textContent = label;
    this.text.innerHTML = this.definitions.sections[anchor]?.html ?? "";
    this.text.scrollTop = 0;
  }

  /**
   * Below the figure, or above it where there is more room.
   * @param {DOMRect} at
   */
  #place(at) {
    const { style } = this.element;
    const below = innerHeight - at.bottom - 2 * MARGIN;
    const above = at.top - 2 * MARGIN;
    style.maxHeight = `${Math.min(Math.max(below, above, 120), 0.7 * innerHeight)}px`;
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const top = height <= below || below >= above ? at.bottom + MARGIN : at.top - MARGIN - height;
    style.left = `${Math.max(MARGIN, Math.min(at.left, innerWidth - width - MARGIN))}px`;
    style.top = `${Math.max(MARGIN, Math.min(top, innerHeight - height - MARGIN))}px`;
  }
}
