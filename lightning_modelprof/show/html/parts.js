// Parts of a report as they stand in a page: everything in them that can be pressed is made to work.

import { connectChart } from "./charts.js";
import { connectChanges, connectCopying } from "./copying.js";
import { FlameGraph } from "./flame.js";
import { connectPlaces } from "./places.js";
import { connectRowLinks } from "./rows.js";
import { connectStepCard } from "./step_card.js";
import { SortableTable } from "./tables.js";

/**
 * How a reader looks at tables and flame graphs, by their ids; from an address anything can come.
 * @typedef {{tables?: Record<string, any>, flames?: Record<string, any>}} Looks
 */

const PAUSE_MS = 200; // while somebody types, a look is not told

/**
 * @param {ParentNode} root where the parts are; call it once for each piece of HTML
 * @param {{state?: Looks, onState?: (changed: Looks) => void}} options how the reader has left the parts, and who is
 *   told when that changes: the looks of all tables, or of all flame graphs
 * @returns {{flames: FlameGraph[]}} what else a page may want to talk to
 */
export function connectParts(root, { state = {}, onState = () => {} } = {}) {
  /** @type {Record<"tables" | "flames", Record<string, any>>} */
  const looks = { tables: { ...state.tables }, flames: { ...state.flames } };
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  /** @type {Looks} */
  let changed = {};
  /** @type {(kind: "tables" | "flames", element: Element) => [any, (look: object) => void]} */
  const lookOf = (kind, element) => {
    const id = element.closest("[id]")?.id.replace(/^(table|flame)-/, "") ?? "";
    const tell = (/** @type {object} */ look) => {
      if (Object.keys(look).length) looks[kind][id] = look;
      else delete looks[kind][id];
      changed = { ...changed, [kind]: looks[kind] };
      clearTimeout(timer);
      timer = setTimeout(() => {
        onState(changed);
        changed = {};
      }, PAUSE_MS);
    };
    const look = Object.hasOwn(looks[kind], id) ? looks[kind][id] : undefined;
    return [typeof look === "object" && look !== null ? look : {}, tell];
  };
  /** @type {NodeListOf<HTMLTableElement>} */
  const tables = root.querySelectorAll(".table table");
  for (const table of tables) {
    new SortableTable(table, ...lookOf("tables", table));
    connectCopying(table);
    connectRowLinks(table);
  }
  connectPlaces(root);
  connectChanges(root);
  /** @type {NodeListOf<HTMLElement>} */
  const charts = root.querySelectorAll("figure.chart");
  charts.forEach(connectChart);
  /** @type {NodeListOf<HTMLElement>} */
  const cards = root.querySelectorAll("figure.step");
  cards.forEach(connectStepCard);
  /** @type {NodeListOf<HTMLElement>} */
  const figures = root.querySelectorAll("figure.flame");
  return { flames: Array.from(figures, (figure) => new FlameGraph(figure, ...lookOf("flames", figure))) };
}
