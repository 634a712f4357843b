// Parts of a report as they stand in a page: everything in them that can be pressed is made to work.

import { connectChart } from "./charts.js";
import { connectCopying } from "./copying.js";
import { FlameGraph } from "./flame.js";
import { connectPlaces } from "./places.js";
import { connectRowLinks } from "./rows.js";
import { connectStepCard } from "./step_card.js";
import { SortableTable } from "./tables.js";

/**
 * @param {ParentNode} root where the parts are; call it once for each piece of HTML
 * @returns {{flames: FlameGraph[]}} what else a page may want to talk to
 */
export function connectParts(root) {
  /** @type {NodeListOf<HTMLTableElement>} */
  const tables = root.querySelectorAll(".table table");
  for (const table of tables) {
    new SortableTable(table);
    connectCopying(table);
    connectRowLinks(table);
  }
  connectPlaces(root);
  /** @type {NodeListOf<HTMLElement>} */
  const charts = root.querySelectorAll("figure.chart");
  charts.forEach(connectChart);
  /** @type {NodeListOf<HTMLElement>} */
  const cards = root.querySelectorAll("figure.step");
  cards.forEach(connectStepCard);
  /** @type {NodeListOf<HTMLElement>} */
  const figures = root.querySelectorAll("figure.flame");
  return { flames: Array.from(figures, (figure) => new FlameGraph(figure)) };
}
