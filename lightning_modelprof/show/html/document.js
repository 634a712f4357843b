// The document of a report: its charts, flame graphs and tables are drawn from it; its head is HTML already.

import { drawChart } from "./chart.js";
import { connectChanges } from "./copying.js";
import { FlameGraph } from "./flame.js";
import { connectPlaces } from "./places.js";
import { connectStepCard } from "./step_card.js";
import { SortableTable } from "./table.js";

/**
 * @typedef {Object} PageDocument
 * @property {import("./chart.js").ChartData[]} charts
 * @property {import("./flame.js").FlameData[]} flames
 * @property {import("./cells.js").TableData[]} tables
 */

/**
 * How a reader looks at tables and flame graphs, by their ids; from an address anything can come.
 * @typedef {{tables?: Record<string, any>, flames?: Record<string, any>}} Looks
 */

/** @typedef {{charts: HTMLElement[], flames: FlameGraph[], tables: SortableTable[]}} Drawn */

const PAUSE_MS = 200; // while somebody types, a look is not told

/**
 * Draw all of a document; where it stands is up to the page.
 * @param {PageDocument} document
 * @param {{state?: Looks, onState?: (changed: Looks) => void}} options how the reader has left the parts, and who is
 *   told when that changes: the looks of all tables, or of all flame graphs
 * @returns {Drawn}
 */
export function drawDocument({ charts, flames, tables }, { state = {}, onState = () => {} } = {}) {
  /** @type {Record<"tables" | "flames", Record<string, any>>} */
  const looks = { tables: { ...state.tables }, flames: { ...state.flames } };
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  /** @type {Looks} */
  let changed = {};
  /** @type {(kind: "tables" | "flames", id: string) => [any, (look: object) => void]} */
  const lookOf = (kind, id) => {
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
  return {
    charts: charts.map(drawChart),
    flames: flames.map((data) => new FlameGraph(data, ...lookOf("flames", data.id))),
    tables: tables.map((data) => new SortableTable(data, ...lookOf("tables", data.id))),
  };
}

/**
 * Make everything in the HTML of a head work that can be pressed.
 * @param {ParentNode} root call it once for each piece of HTML
 */
export function connectHead(root) {
  connectPlaces(root);
  connectChanges(root);
  /** @type {NodeListOf<HTMLElement>} */
  const cards = root.querySelectorAll("figure.step");
  cards.forEach(connectStepCard);
}
