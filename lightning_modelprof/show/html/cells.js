// Tables as the report writes them: texts and values, nothing of which is computed or rounded here.

/** @typedef {[left: number, width: number, tone: string, isCut: boolean]} Change the bar of a change */

/**
 * A text alone, or with its raw number (null for text and for what was not measured), the whole name where the text
 * is cut, and a bar.
 * @typedef {string | [text: string, value: number | null, full?: string, change?: Change]} Cell
 */

/**
 * @typedef {Object} Header
 * @property {string} label
 * @property {boolean} is_number whether its cells belong to the right
 * @property {boolean} is_sortable
 * @property {boolean} is_share whether its cells have bars
 * @property {string} raw heading of the raw numbers
 * @property {string} full heading of the numbers as shown, where nothing else says group and unit
 * @property {string} key
 * @property {string} about
 */

/** @typedef {{name: string, num_rows: number, sums: (Cell | null)[], num_known: number[]}} Group */

/**
 * @typedef {Object} TableData
 * @property {string} id
 * @property {string} title
 * @property {string} about
 * @property {string} unit
 * @property {Header[]} headers
 * @property {[label: string, span: number][]} groups headings above headings
 * @property {number[]} hidden places of columns that are not seen at first
 * @property {number | null} sorted_by place of the column that orders the rows
 * @property {Cell[][]} rows the name of each first
 * @property {number[]} depths of the rows of a tree; empty otherwise
 * @property {Record<number, string>} raw_names by row: its name with the unit of its raw numbers
 * @property {Record<number, string>} abouts by row: what it means
 * @property {number} limit
 * @property {boolean} is_tree
 * @property {number} open_depth from here on rows are folded
 * @property {{label: string, members: number[], groups: Group[]}[]} groupings
 * @property {[tone: string, word: string][]} tones
 * @property {string[]} notes
 * @property {boolean} is_folded
 * @property {string[] | null} no_slices where rows are named as slices of the timeline: those that have none
 */

/** @param {Cell} cell */
export function textOf(cell) {
  return typeof cell === "string" ? cell : cell[0];
}

/** @param {Cell} cell */
export function valueOf(cell) {
  return typeof cell === "string" ? null : cell[1];
}

/**
 * The name, where the cell shows a part of it.
 * @param {Cell} cell
 */
export function wholeText(cell) {
  return (typeof cell === "string" ? "" : cell[2]) || textOf(cell).trim();
}

/** @param {number} count */
export function countRows(count) {
  return `${count.toLocaleString("en")} row${count === 1 ? "" : "s"}`;
}

/** @param {Cell} cell */
export function isMissing(cell) {
  return valueOf(cell) === null && textOf(cell).trim() === "–";
}
