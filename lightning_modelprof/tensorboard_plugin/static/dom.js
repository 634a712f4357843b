// Elements of the dashboard.

import { make } from "./html/dom.js";

export { make };

/**
 * A labeled list to select from.
 * @param {string} label
 * @param {{value: string, text: string}[]} options
 * @param {string} chosen
 * @param {string} key for keeping the focus on the list
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
 * Change the content of an element. If it has the keyboard focus, that stays at the same `data-key`, or goes to the
 * element that `change` returns.
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
