// Brings the parts of a view to life: what report.html does on its page, and the help beside each figure.

import { make } from "./dom.js";
import { HelpPage } from "./help_page.js";
import { attachHelp } from "./html/help/help.js";
import { connectParts } from "./html/parts.js";
import { showRow } from "./html/rows.js";
import { parseLink } from "./link.js";
import { askJson } from "./server.js";

/** @typedef {import("./link.js").Choice} Choice */

/** @type {Promise<any> | undefined} */
let definitions;
/** @type {HelpPage | undefined} */
let page;

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
  definitions ??= askJson("definitions");
  definitions
    .then((known) => {
      page ??= new HelpPage(known);
      if (root.isConnected) attachHelp(root, known, (anchor, from) => page?.open(anchor, from));
    })
    .catch(() => {
      definitions = undefined; // the figures are there without their help
    });
}

/**
 * @param {string} name in the address
 * @param {object | undefined} state
 * @returns {Choice}
 */
function stated(name, state) {
  return state ? { [name]: Object.keys(state).length ? JSON.stringify(state) : "" } : {};
}
