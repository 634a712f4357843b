// Brings the parts of a view to life: what report.html does on its page, and the help beside each figure.

import { attachHelp } from "./help.js";
import { connectParts } from "./html/parts.js";
import { askJson } from "./server.js";

/** @type {Promise<any> | undefined} */
let definitions;

/**
 * @param {HTMLElement} root
 * @param {string} html written by the plugin, which escapes every name
 */
export function showParts(root, html) {
  root.innerHTML = html;
  connectParts(root);
  definitions ??= askJson("definitions");
  definitions.then((known) => root.isConnected && attachHelp(root, known)).catch(() => {
    definitions = undefined; // the figures are there without their help
  });
}
