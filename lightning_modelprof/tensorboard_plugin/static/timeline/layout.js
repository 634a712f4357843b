// Vertical positions, in CSS pixels: groups, their lanes with rows of slices, counters.

/** @typedef {import("./slices.js").Slices} Slices */
/** @typedef {{kind: "group" | "lane" | "counter", label: string, group: string, place: number, key: string, y: number, height: number, isOpen: boolean, canOpen: boolean}} Item `place`: index of the lane or counter; `key`: identifies it when folded */
/** @typedef {{row: import("./slices.js").Row, y: number}} PlacedRow */

export const ROW = 18;
export const SLICE = 17; // of ROW
const GROUP = 24;
const COUNTER = 44;
const SPACE = 6;

export class Layout {
  /**
   * @param {Slices} slices
   * @param {Set<string>} folded keys of groups and lanes; changes as the reader folds them
   */
  constructor(slices, folded) {
    this.slices = slices;
    this.folded = folded;
    this.groups = [...new Set([...slices.lanes, ...slices.counters].map(({ group }) => group))];
    /** @type {Item[]} */
    this.items = [];
    /** @type {PlacedRow[]} from top to bottom */
    this.rows = [];
    this.height = 0;
    this.arrange();
  }

  arrange() {
    this.items = [];
    this.rows = [];
    let y = 0;
    /**
     * @param {Item["kind"]} kind
     * @param {{key: string, label: string, group: string, place: number, height: number, isOpen: boolean, canOpen: boolean}} item
     */
    const add = (kind, item) => {
      this.items.push({ ...item, kind, y });
      y += item.height;
    };
    for (const group of this.groups) {
      const own = this.slices.lanes.filter((lane) => lane.group === group);
      const isAlone = own.length === 1 && own[0].label === group; // its label is enough
      const isOpen = isAlone || !this.folded.has(group);
      if (!isAlone) add("group", { key: group, label: group, group, place: -1, height: GROUP, isOpen, canOpen: true });
      if (!isOpen) continue;
      this.slices.lanes.forEach((lane, place) => {
        if (lane.group !== group || !lane.rows.length) return; // all of it is hidden
        const key = keyOf(lane);
        const isLaneOpen = !this.folded.has(key);
        const rows = isLaneOpen ? lane.rows.filter(Boolean) : lane.rows.slice(0, 1);
        rows.forEach((row, at) => this.rows.push({ row, y: y + at * ROW }));
        const height = Math.max(1, rows.length) * ROW + SPACE;
        const { label } = lane;
        add("lane", { key, label, group, place, height, isOpen: isLaneOpen, canOpen: lane.rows.length > 1 });
      });
      this.slices.counters.forEach((counter, place) => {
        if (counter.group !== group) return;
        const { label } = counter;
        add("counter", { key: "", label, group, place, height: COUNTER, isOpen: true, canOpen: false });
      });
    }
    this.height = y;
  }

  /** @param {Item} item a group or a lane */
  toggle({ key }) {
    if (!this.folded.delete(key)) this.folded.add(key);
    this.arrange();
  }

  /**
   * Open everything that hides a row.
   * @param {import("./slices.js").Row} row
   */
  reveal(row) {
    const lane = this.slices.lanes[row.lane];
    const wasGroup = this.folded.delete(lane.group);
    const wasLane = row.depth > 0 && this.folded.delete(keyOf(lane));
    if (wasGroup || wasLane) this.arrange();
    return wasGroup || wasLane;
  }

  /**
   * The row at a height; undefined between rows.
   * @param {number} y
   */
  rowAt(y) {
    return this.rows.find((placed) => placed.y <= y && y < placed.y + SLICE);
  }

  /** @param {import("./slices.js").Row} row */
  yOf(row) {
    return this.rows.find((placed) => placed.row === row)?.y;
  }
}

/** @param {{group: string, label: string}} lane */
function keyOf({ group, label }) {
  return `${group}/${label}`;
}
