// Where everything stands from top to bottom, in CSS pixels: groups, their lanes with rows of slices, counters.

/** @typedef {import("./slices.js").Slices} Slices */
/** @typedef {{kind: "group" | "lane" | "counter", label: string, group: string, place: number, y: number, height: number, isOpen: boolean, canOpen: boolean}} Item `place`: of the lane or counter */
/** @typedef {{row: import("./slices.js").Row, y: number}} PlacedRow */

export const ROW = 18;
export const SLICE = 17; // of ROW
const GROUP = 24;
const COUNTER = 44;
const SPACE = 6;

export class Layout {
  /** @param {Slices} slices */
  constructor(slices) {
    this.slices = slices;
    this.groups = [...new Set([...slices.lanes, ...slices.counters].map(({ group }) => group))];
    /** @type {Set<string>} */
    this.closedGroups = new Set();
    /** @type {Set<number>} */
    this.closedLanes = new Set();
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
     * @param {{label: string, group: string, place: number, height: number, isOpen: boolean, canOpen: boolean}} item
     */
    const add = (kind, item) => {
      this.items.push({ ...item, kind, y });
      y += item.height;
    };
    for (const group of this.groups) {
      const isOpen = !this.closedGroups.has(group);
      add("group", { label: group, group, place: -1, height: GROUP, isOpen, canOpen: true });
      if (!isOpen) continue;
      this.slices.lanes.forEach((lane, place) => {
        if (lane.group !== group) return;
        const isLaneOpen = !this.closedLanes.has(place);
        const rows = isLaneOpen ? lane.rows.filter(Boolean) : lane.rows.slice(0, 1);
        rows.forEach((row, at) => this.rows.push({ row, y: y + at * ROW }));
        const height = Math.max(1, rows.length) * ROW + SPACE;
        add("lane", { label: lane.label, group, place, height, isOpen: isLaneOpen, canOpen: lane.rows.length > 1 });
      });
      this.slices.counters.forEach((counter, place) => {
        if (counter.group !== group) return;
        const { label } = counter;
        add("counter", { label, group, place, height: COUNTER, isOpen: true, canOpen: false });
      });
    }
    this.height = y;
  }

  /** @param {Item} item a group or a lane */
  toggle(item) {
    /** @type {Set<any>} */
    const closed = item.kind === "group" ? this.closedGroups : this.closedLanes;
    const key = item.kind === "group" ? item.group : item.place;
    if (!closed.delete(key)) closed.add(key);
    this.arrange();
  }

  /**
   * Open what hides a row.
   * @param {import("./slices.js").Row} row
   */
  reveal(row) {
    const group = this.closedGroups.delete(this.slices.lanes[row.lane].group);
    const lane = row.depth > 0 && this.closedLanes.delete(row.lane);
    if (group || lane) this.arrange();
    return group || lane;
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
