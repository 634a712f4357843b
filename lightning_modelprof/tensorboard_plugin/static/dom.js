// Elements that the dashboard needs.

import { make } from "./html/dom.js";

export { make };

/**
 * A list to choose one from, with its label.
 * @param {string} label
 * @param {{value: string, text: string}[]} options
 * @param {string} chosen
 * @param {string} key under which the list keeps the focus
 * @param {(value: string) => void} choose
 */
export function chooser(label, options, chosen, key, choose) {
  const list = make("select", { "data-key": key, onchange: () => choose(list.value) });
  for (const { value, text } of options) {
    list.append(make("option", { value, selected: value === chosen }, text));
  }
  return make("label", { class: "chooser" }, make("span", {}, label), list);
}

/**
 * Change what is in an element. If the keyboard focus is in there, it stays at what has the same `data-key`, or goes to
 * the element that `change` gives.
 * @param {HTMLElement} root
 * @param {() => HTMLElement | undefined} change
 */
export function keepFocus(root, change) {
  const focused = document.activeElement;
  const isInside = focused !== root && root.contains(focused);
  const key = focused?.closest("[data-key]")?.getAttribute("data-key") ?? "";
  const fallback = change();
  if (!isInside) return;
  const same = /** @type {HTMLElement | null} */ (key && root.querySelector(`[data-key="${CSS.escape(key)}"]`));
  (same || fallback)?.focus({ preventScroll: true });
}
