// Elements in one expression. Names come from anybody's code, so text is only ever set as text.

import { make } from "../dom.js";

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, string | boolean>} attributes `text` is what it says
 * @param {...(Node | string)} children what follows the text
 * @returns {HTMLElementTagNameMap[T]}
 */
export function element(tag, { text = "", ...attributes } = {}, ...children) {
  return make(tag, attributes, ...(text ? [String(text)] : []), ...children);
}

/**
 * @param {string} label
 * @param {() => void} onClick
 * @param {Record<string, string | boolean>} attributes
 */
export function button(label, onClick, attributes = {}) {
  const made = element("button", { type: "button", text: label, ...attributes });
  made.addEventListener("click", onClick);
  return made;
}
