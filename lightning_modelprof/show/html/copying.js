// Copies of a table for a spreadsheet and for Markdown: the rows and columns that are seen, in their order.

import { isColumnHidden } from "./columns.js";

/**
 * Make the copy buttons of a table work.
 * @param {HTMLTableElement} table
 */
export function connectCopying(table) {
  const tools = table.closest(".table")?.querySelector(".tools");
  const said = tools?.querySelector("output");
  /** @type {(name: string, write: (table: HTMLTableElement) => {text: string, count: number}) => void} */
  const on = (name, write) => {
    tools?.querySelector(`[data-do=${name}]`)?.addEventListener("click", async () => {
      const { text, count } = write(table);
      const isDone = await copyText(text);
      const rows = `${count.toLocaleString("en")} row${count === 1 ? "" : "s"}`;
      if (said) said.textContent = isDone ? `Copied ${rows}` : "The browser doesn't allow copying";
    });
  };
  on("csv", tableAsCsv);
  on("markdown", tableAsMarkdown);
}

/**
 * Make the buttons that copy a change work.
 * @param {ParentNode} root
 */
export function connectChanges(root) {
  /** @type {NodeListOf<HTMLButtonElement>} */
  const buttons = root.querySelectorAll("[data-do=change]");
  for (const button of buttons) {
    button.addEventListener("click", async () => {
      const isDone = await copyText(button.dataset.copied ?? "");
      const said = button.parentElement?.querySelector("output");
      if (said) said.textContent = isDone ? "Copied" : "The browser does not let this page copy";
    });
  }
}

/**
 * Without navigator.clipboard, as in frames and on pages without TLS, the selection is copied.
 * @param {string} text
 * @returns {Promise<boolean>} whether it is in the clipboard
 */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelection(text);
  }
}

/** @param {string} text */
function copySelection(text) {
  const focused = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.style.cssText = "position:fixed;left:-99rem;top:0";
  document.body.append(area);
  area.select();
  try {
    return document.execCommand("copy");
  } catch {
    return false;
  } finally {
    area.remove();
    if (focused instanceof HTMLElement) focused.focus({ preventScroll: true });
  }
}

/**
 * Quoted as in RFC 4180. Numbers are raw: in the unit that their heading says, ratios as fractions. A tree has
 * its depth in the first column, grouped rows their group; a heading stands for the rows that are folded into
 * it, so that nothing is there twice.
 * @param {HTMLTableElement} table
 */
function tableAsCsv(table) {
  const rows = seenRows(table);
  const isTree = rows.some((row) => row.dataset.depth);
  const isGrouped = rows.some(isGroup);
  const first = isTree ? ["Depth"] : isGrouped ? ["Group"] : [];
  const lines = [[...first, ...seenCells(table, headersOf(table)).map((header) => csvText(header.dataset.raw ?? ""))].join(",")];
  let group = "";
  for (const row of rows) {
    const cells = seenCells(table, row.cells).map(csvCell);
    if (isGroup(row)) {
      group = csvText(row.cells[0].dataset.group ?? "");
      if (row.querySelector(".twist[aria-expanded=true]")) continue;
      cells[0] = "";
    }
    const before = isTree ? [row.dataset.depth ?? "0"] : isGrouped ? [group] : [];
    lines.push([...before, ...cells].join(","));
  }
  return { text: lines.map((line) => `${line}\n`).join(""), count: lines.length - 1 };
}

/** @param {HTMLTableCellElement} cell */
function csvCell(cell) {
  if (cell.dataset.v !== undefined) return String(Number(cell.dataset.v));
  if (cell.classList.contains("none")) return ""; // not measured
  return csvText(cell.dataset.raw ?? wholeText(cell));
}

// What a spreadsheet takes for the begin of a formula: OWASP's list, whose signs may be wide ones and have spaces
// before them. Not only at the begin of a cell: where commas are decimal points, a cell ends at each semicolon.
const FORMULA = /(^|;)([\t\r\n]|\s*[=+\-@\uff1d\uff0b\uff0d\uff20])/g;

/**
 * A spreadsheet would run a text that begins like a formula; the apostrophe makes it a text.
 * @param {string} text
 */
function csvText(text) {
  const safe = text.replace(FORMULA, "$1'$2");
  return /[",;'\r\n\t]|^\s|\s$/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/**
 * The name, where the cell shows a part of it.
 * @param {HTMLElement} cell
 */
export function wholeText(cell) {
  /** @type {HTMLElement | null} */
  const cut = cell.querySelector(":scope > span[title]");
  return cut?.title || cell.textContent.trim();
}

/** @param {HTMLTableElement} table */
function tableAsMarkdown(table) {
  const headers = seenCells(table, headersOf(table));
  const rule = headers.map((header) => (header.classList.contains("n") ? "---:" : ":---"));
  const rows = seenRows(table).map((row) => seenCells(table, row.cells).map((cell, place) => markdownCell(row, cell, place)));
  const lines = [headers.map((header) => markdownName(header.dataset.full ?? "")), rule, ...rows];
  return { text: lines.map((cells) => `| ${cells.join(" | ")} |\n`).join(""), count: rows.length };
}

/**
 * @param {HTMLTableRowElement} row
 * @param {HTMLTableCellElement} cell
 * @param {number} place
 */
function markdownCell(row, cell, place) {
  const { group } = cell.dataset;
  const shown = cell.textContent.trim();
  const text = cell.dataset.v === undefined ? markdownName(shown) : markdownText(shown);
  if (place > 0) return text;
  if (group === undefined) return "&nbsp;&nbsp;".repeat(Number(row.dataset.depth ?? 0)) + text;
  return `**${markdownText(group)}** (${cell.querySelector(".count")?.textContent})`;
}

/**
 * A name that is a formula nowhere: its first sign is written as an entity, which is shown as it is.
 * @param {string} text
 */
function markdownName(text) {
  if (text.search(FORMULA) !== 0) return markdownText(text);
  const rest = text.trimStart();
  return `&#${rest.charCodeAt(0)};${markdownText(rest.slice(1))}`;
}

/**
 * As the report's own Markdown escapes names.
 * @param {string} text
 */
function markdownText(text) {
  /** @type {Record<string, string>} */
  const entities = { "&": "&amp;", "<": "&lt;", ">": "&gt;", "~": "&#126;" };
  return text.replace(/[\\`*_{}[\]#|]/g, "\\$&").replace(/[&<>~]/g, (char) => entities[char]);
}

/** @param {HTMLTableElement} table */
function seenRows(table) {
  return Array.from(table.tBodies[0].rows).filter((row) => !row.hidden);
}

/**
 * Those of a row whose columns are seen.
 * @param {HTMLTableElement} table
 * @param {Iterable<HTMLTableCellElement>} cells
 */
function seenCells(table, cells) {
  return Array.from(cells).filter((_, place) => !isColumnHidden(table, place));
}

/** @param {HTMLTableElement} table */
function headersOf(table) {
  const head = /** @type {HTMLTableSectionElement} */ (table.tHead);
  return Array.from(head.rows[head.rows.length - 1].cells);
}

/** @param {HTMLTableRowElement} row */
function isGroup(row) {
  return row.classList.contains("group");
}
