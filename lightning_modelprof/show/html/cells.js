// Tables as the report writes them: texts and values; nothing is computed or rounded here.

/** @typedef {[left: number, width: number, tone: string, isCut: boolean]} Change the bar of a change */

/**
 * A text, or a text with its raw number (null for text and missing values), the whole name if the text is cut, and a
 * bar.
 * @typedef {string | [text: string, value: number | null, full?: string, change?: Change]} Cell
 */

/**
 * @typedef {Object} Header
 * @property {string} label
 * @property {boolean} is_number whether its cells are right-aligned
 * @property {boolean} is_sortable
 * @property {boolean} is_share whether its cells have bars
 * @property {string} raw heading of the raw numbers
 * @property {string} full heading of the displayed numbers without any context, with group and unit
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
 * @property {number[]} hidden columns that aren't visible at first
 * @property {number | null} sorted_by column that orders the rows
 * @property {Cell[][]} rows each with its name first
 * @property {number[]} depths of the rows of a tree; empty otherwise
 * @property {Record<number, string>} raw_names by row: its name with the unit of its raw numbers
 * @property {Record<number, string>} abouts by row: its definition
 * @property {number} limit
 * @property {boolean} is_tree
 * @property {number} open_depth from this depth on, rows are folded
 * @property {{label: string, members: number[], groups: Group[]}[]} groupings
 * @property {[tone: string, word: string][]} tones
 * @property {string[]} notes
 * @property {boolean} is_folded
 * @property {string[] | null} no_slices if rows are named like slices of the timeline: those without slices
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
 * The name, if the cell shows only part of it.
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
