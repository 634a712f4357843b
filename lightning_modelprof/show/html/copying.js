// Copies of a table for spreadsheets and Markdown: the visible rows and columns, in their order.

import { countRows, isMissing, textOf, valueOf, wholeText } from "./cells.js";

/** @typedef {import("./cells.js").Cell} Cell */
/** @typedef {import("./table.js").Row} Row */
/** @typedef {import("./table.js").SortableTable} SortableTable */

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
 * Without navigator.clipboard, as in frames and on pages without TLS, copies the selection.
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
 * Quoted as in RFC 4180. Numbers are raw: in the heading's unit, ratios as fractions. A tree has its depth in the
 * first column, grouped rows their group; a heading represents the rows that are folded into it, so that nothing
 * appears twice.
 * @param {SortableTable} table
 */
export function tableAsCsv({ data, headings, listed, seen }) {
  const isTree = listed.some((row) => row.depth);
  const isGrouped = headings.length > 0;
  const first = isTree ? ["Depth"] : isGrouped ? ["Group"] : [];
  const lines = [[...first, ...seen.map((place) => csvText(data.headers[place].raw))].join(",")];
  let group = "";
  for (const row of listed) {
    const cells = seen.map((place) => csvCell(row.cells[place]));
    if (row.group) {
      group = csvText(row.group.name);
      if (row.isExpanded) continue;
      cells[0] = "";
    } else if (data.raw_names[row.index]) {
      cells[0] = csvText(data.raw_names[row.index]);
    }
    const before = isTree ? [row.depth] : isGrouped ? [group] : [];
    lines.push([...before, ...cells].join(","));
  }
  return { text: lines.map((line) => `${line}\n`).join(""), count: lines.length - 1 };
}

/** @param {Cell} cell */
function csvCell(cell) {
  const value = valueOf(cell);
  return value !== null ? String(value) : isMissing(cell) ? "" : csvText(wholeText(cell));
}

// Starts of formulas in spreadsheets: OWASP's list, whose characters may be full-width and follow spaces. They matter
// not only at the start of a cell: where commas are decimal points, cells end at semicolons.
const FORMULA = /(^|;)([\t\r\n]|\s*[=+\-@\uff1d\uff0b\uff0d\uff20])/g;

/**
 * A spreadsheet would run a text that starts like a formula; the apostrophe makes it a text.
 * @param {string} text
 */
function csvText(text) {
  const safe = text.replace(FORMULA, "$1'$2");
  return /[",;'\r\n\t]|^\s|\s$/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** @param {SortableTable} table */
export function tableAsMarkdown({ data, listed, seen }) {
  const headers = seen.map((place) => data.headers[place]);
  const rule = headers.map((header) => (header.is_number ? "---:" : ":---"));
  const rows = listed.map((row) => seen.map((place) => markdownCell(row, place)));
  const lines = [headers.map((header) => markdownName(header.full)), rule, ...rows];
  return { text: lines.map((cells) => `| ${cells.join(" | ")} |\n`).join(""), count: rows.length };
}

/**
 * @param {Row} row
 * @param {number} place
 */
function markdownCell({ cells, depth, group }, place) {
  const shown = textOf(cells[place]).trim();
  if (place === 0 && group) {
    return `**${markdownText(group.name)}** (${countRows(group.num_rows)})`;
  }
  const text = valueOf(cells[place]) === null ? markdownName(shown) : markdownText(shown);
  return place ? text : "&nbsp;&nbsp;".repeat(depth) + text;
}

/**
 * A name that isn't read as a formula: its first character is an entity, which displays the same.
 * @param {string} text
 */
function markdownName(text) {
  if (text.search(FORMULA) !== 0) return markdownText(text);
  const rest = text.trimStart();
  return `&#${rest.charCodeAt(0)};${markdownText(rest.slice(1))}`;
}

/**
 * Escape names as the report's own Markdown does.
 * @param {string} text
 */
function markdownText(text) {
  /** @type {Record<string, string>} */
  const entities = { "&": "&amp;", "<": "&lt;", ">": "&gt;", "~": "&#126;" };
  return text.replace(/[\\`*_{}[\]#|]/g, "\\$&").replace(/[&<>~]/g, (char) => entities[char]);
}
