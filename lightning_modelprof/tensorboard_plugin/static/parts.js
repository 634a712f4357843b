// Brings the parts of a view to life, as report.html does on its page.

import { make } from "./dom.js";
import { connectParts } from "./html/parts.js";
import { showRow } from "./html/rows.js";
import { parseLink } from "./link.js";

/** @typedef {import("./link.js").Choice} Choice */

/**
 * @param {HTMLElement} root
 * @param {string} html written by the plugin, which escapes every name
 * @param {Choice} choice what is shown, and how the reader looks at it
 * @param {(looks: Choice) => void} remember
 */
export function showParts(root, html, choice, remember) {
  root.innerHTML = html;
  /** @type {(root: HTMLElement, options: object) => unknown} */ (connectParts)(root, {
    state: { tables: parseLink(choice.at_tables), flames: parseLink(choice.at_flames) },
    onState: (/** @type {{tables?: object, flames?: object}} */ { tables, flames }) =>
      remember({ ...stated("at_tables", tables), ...stated("at_flames", flames) }),
  });
  const name = parseLink(choice.row)?.name;
  if (typeof name === "string" && !showRow(root, name)) {
    root.prepend(make("p", { class: "note", role: "status" }, `No row is named ${name}.`));
  }
}

/**
 * @param {string} name in the address
 * @param {object | undefined} state
 * @returns {Choice}
 */
function stated(name, state) {
  return state ? { [name]: Object.keys(state).length ? JSON.stringify(state) : "" } : {};
}
