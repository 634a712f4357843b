// A report's document: its charts, flame graphs and tables are drawn from it; its head is already HTML.

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
 * A reader's settings for tables and flame graphs, by id; an address can contain anything.
 * @typedef {{tables?: Record<string, any>, flames?: Record<string, any>}} Looks
 */

/** @typedef {{charts: HTMLElement[], flames: FlameGraph[], tables: SortableTable[]}} Drawn */

const PAUSE_MS = 200; // while typing, settings aren't reported

/** A reader's settings for the parts of one or more documents; notifies of changes. */
export class LooksOfParts {
  /**
   * @param {Looks} state how the reader left the parts
   * @param {(changed: Looks) => void} onState gets the settings of all tables, or of all flame graphs
   */
  constructor(state = {}, onState = () => {}) {
    /** @type {Record<"tables" | "flames", Record<string, any>>} */
    this.looks = { tables: { ...state.tables }, flames: { ...state.flames } };
    this.onState = onState;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
    /** @type {Looks} */
    this.changed = {};
  }

  /**
   * @param {"tables" | "flames"} kind
   * @param {string} id
   * @returns {[any, (look: object) => void]} the settings of a part, and a function that changes them
   */
  of(kind, id) {
    const looks = this.looks[kind];
    const tell = (/** @type {object} */ look) => {
      if (Object.keys(look).length) looks[id] = look;
      else delete looks[id];
      this.changed = { ...this.changed, [kind]: looks };
      clearTimeout(this.timer);
      this.timer = setTimeout(() => {
        this.onState(this.changed);
        this.changed = {};
      }, PAUSE_MS);
    };
    const look = Object.hasOwn(looks, id) ? looks[id] : undefined;
    return [typeof look === "object" && look !== null ? look : {}, tell];
  }
}

/**
 * Draw everything in a document; the page places it.
 * @param {PageDocument} document
 * @returns {Drawn}
 */
export function drawDocument({ charts, flames, tables }, looks = new LooksOfParts()) {
  return {
    charts: charts.map(drawChart),
    flames: flames.map((data) => new FlameGraph(data, ...looks.of("flames", data.id))),
    tables: tables.map((data) => new SortableTable(data, ...looks.of("tables", data.id))),
  };
}

/**
 * Make all controls in a head's HTML work.
 * @param {ParentNode} root call it once per piece of HTML
 */
export function connectHead(root) {
  connectPlaces(root);
  connectChanges(root);
  /** @type {NodeListOf<HTMLElement>} */
  const cards = root.querySelectorAll("figure.step");
  cards.forEach(connectStepCard);
}
