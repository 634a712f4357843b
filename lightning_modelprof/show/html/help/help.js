// The definition beside each figure: a "?" at headings, and at columns and rows a card on hover or by the key "?".

import { make } from "../make.js";
import { HelpCard } from "./help_card.js";

/** @typedef {{heading?: string, html: string}} Section written in Python, of our own words alone */
/** @typedef {{sections: Record<string, Section>, figures: Record<string, string>}} Definitions */
/** @typedef {{label: string, anchor: string}} Topic a figure, and where it is defined */
/** @typedef {(anchor: string, from: HTMLElement | null) => void} ShowAll shows every definition, beginning at a section */

const HOVER_MS = 600;

/**
 * Put help at every figure in `root` that is defined.
 * @param {HTMLElement} root holds parts of a report
 * @param {Definitions} definitions
 * @param {ShowAll} [showAll] where the page has all definitions
 */
export function attachHelp(root, definitions, showAll) {
  const card = HelpCard.of(definitions, showAll);
  const { figures } = definitions;
  for (const table of all(root, "section.table[id]")) helpTable(table, figures, card);
  for (const kind of ["chart", "flame"]) {
    for (const figure of all(root, `figure.${kind}[id]`)) {
      helpHeading(figure.querySelector("h3"), figures[`${kind}:${nameIn(figure.id, kind)}`], card);
    }
  }
  for (const label of all(root, "dl.figures dt")) helpHeading(label, figures[`figure:${helpKey(textOf(label))}`], card);
  for (const finding of all(root, "article.finding[id]")) {
    const kind = nameIn(finding.id, "finding").replace(/-\d+$/, "");
    helpHeading(finding.querySelector("h2"), figures[`rule:${kind}`], card);
  }
  for (const verdict of all(root, "p.verdict")) {
    const anchor = [...verdict.classList].map((kind) => figures[`verdict:${kind}`]).find(Boolean);
    helpHeading(verdict.querySelector("strong"), anchor, card);
  }
}

/**
 * A label as part of a key, as report/definitions.py makes it.
 * @param {string} label
 */
export function helpKey(label) {
  const plain = label.toLowerCase().replaceAll(/\s*\(%\)/g, "");
  return plain.replaceAll(/[^a-z0-9]+/g, "_").replaceAll(/^_+|_+$/g, "") || "percent";
}

/**
 * @param {HTMLElement} section
 * @param {Record<string, string>} figures
 * @param {HelpCard} card
 */
function helpTable(section, figures, card) {
  const found = nameIn(section.id, "table");
  const name = found.endsWith("_changes") ? "changes" : found.replace(/_\d+$/, "");
  /** @type {Topic[]} */
  const topics = [];
  for (const header of all(section, "thead tr:last-child th")) {
    const anchor = figures[`column:${name}:${header.dataset.key}`];
    const label = (header.dataset.full || textOf(header)).replace(/ \([^)]*\)$/, "");
    if (anchor) topics.push(helpCell(header, { label, anchor }, card));
  }
  if (Object.keys(figures).some((key) => key.startsWith(`row:${name}:`))) {
    for (const header of all(section, "tbody th")) {
      const label = textOf(header);
      const anchor = figures[rowKey(figures, name, label)];
      if (anchor) topics.push(helpCell(header, { label, anchor }, card));
    }
  }
  const distinct = new Map(topics.map((topic) => [`${topic.label} ${topic.anchor}`, topic]));
  helpHeading(section.querySelector("h2"), figures[`table:${name}`], card, [...distinct.values()]);
  const region = section.querySelector(".scroll");
  const button = /** @type {HTMLElement | null} */ (section.querySelector(".help"));
  if (region instanceof HTMLElement && button) onQuestion(region, () => button.click());
}

/**
 * What goes before a figure in a row, such as a rank, is no part of the term, nor is a unit: "ips (steps/s)".
 * @param {Record<string, string>} figures
 * @param {string} table
 * @param {string} label
 */
function rowKey(figures, table, label) {
  const words = label.replace(/ \([^)]*\)$/, "").split(" ");
  const keys = words.map((_, start) => `row:${table}:${helpKey(words.slice(start).join(" "))}`);
  return keys.find((key) => key in figures) ?? "";
}

/**
 * @param {Element | null} heading
 * @param {string | undefined} anchor
 * @param {HelpCard} card
 * @param {Topic[]} topics what else the card leads to
 */
function helpHeading(heading, anchor, card, topics = []) {
  if (!heading || !anchor || heading.nextElementSibling?.matches(".help")) return;
  const label = textOf(heading);
  const button = make("button", { type: "button", class: "help", "aria-label": `What is ${label}?` }, "?");
  button.addEventListener("click", (event) => {
    event.preventDefault(); // in a summary it would also fold
    card.open(button, { label, anchor }, topics);
  });
  if (heading.matches("dt")) heading.append(" ", button);
  else heading.after(button);
}

/**
 * @param {HTMLElement} cell
 * @param {Topic} topic
 * @param {HelpCard} card
 */
function helpCell(cell, topic, card) {
  cell.classList.add("has-help");
  cell.querySelector("button:not(.twist)")?.setAttribute("aria-description", "Press ? for the definition");
  let timer = 0;
  cell.addEventListener("pointerenter", (event) => {
    if (event.pointerType !== "mouse") return;
    timer = window.setTimeout(() => card.hover(cell, topic), card.isOpen ? HOVER_MS / 4 : HOVER_MS);
  });
  cell.addEventListener("pointerleave", () => {
    clearTimeout(timer);
    card.leave();
  });
  onQuestion(cell, () => card.open(cell.querySelector("button") ?? cell, topic));
  return topic;
}

/**
 * @param {HTMLElement} element
 * @param {() => void} open
 */
function onQuestion(element, open) {
  element.addEventListener("keydown", (event) => {
    if (event.key !== "?" || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation(); // of a cell in a table the cell's own help
    open();
  });
}

/**
 * @param {HTMLElement} root
 * @param {string} selector
 */
function all(root, selector) {
  return /** @type {HTMLElement[]} */ ([...root.querySelectorAll(selector)]);
}

/**
 * "before-table-kernels" → "kernels"
 * @param {string} id
 * @param {string} kind
 */
function nameIn(id, kind) {
  return id.slice(id.indexOf(`${kind}-`) + kind.length + 1);
}

/** @param {Element} element */
function textOf(element) {
  return (element.textContent ?? "").trim();
}
