// Draws a view's documents, as report.html does the one on its page.

import { COMPARE } from "./choice.js";
import { make } from "./dom.js";
import { LooksOfParts, connectHead, drawDocument } from "./html/document.js";
import { showRow } from "./html/rows.js";
import { parseLink } from "./link.js";

/** @typedef {import("./link.js").Choice} Choice */
/** @typedef {import("./html/document.js").PageDocument} PageDocument */
/** @typedef {PageDocument & {above: string, below: string}} ViewDocument with HTML around it, all names escaped */

/**
 * @param {HTMLElement} root
 * @param {ViewDocument[]} documents
 * @param {Choice} choice the current one, with the reader's settings
 * @param {(looks: Choice) => void} remember
 */
export function showParts(root, documents, choice, remember) {
  const looks = new LooksOfParts(
    { tables: parseLink(choice.at_tables), flames: parseLink(choice.at_flames) },
    ({ tables, flames }) => remember({ ...stated("at_tables", tables), ...stated("at_flames", flames) }),
  );
  const tables = documents.flatMap((document) => {
    const place = choice.view === COMPARE ? root.appendChild(make("section", { class: "comparison" })) : root;
    place.innerHTML = document.above;
    const drawn = drawDocument(document, looks);
    if (drawn.charts.length) place.append(make("section", { class: "charts" }, ...drawn.charts));
    place.append(...[...drawn.flames, ...drawn.tables].map(({ element }) => element));
    place.insertAdjacentHTML("beforeend", document.below);
    connectHead(place);
    return drawn.tables;
  });
  const name = parseLink(choice.row)?.name;
  if (typeof name === "string" && !showRow(tables, name)) {
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
