// The colours of the charts.

import { pageColors } from "../page_colors.js";

/**
 * @typedef {Object} Palette
 * @property {string} page
 * @property {string} line
 * @property {string} text
 * @property {string} dim
 * @property {string} single of what stands alone
 * @property {string[]} layers of the layers
 */

/**
 * Read the colours that an element has in the theme of this moment.
 * @param {HTMLElement} element
 * @param {string[]} names of the colours of layers
 * @returns {Palette}
 */
export function readPalette(element, names) {
  const colors = pageColors(element, ["page", "line", "text", "dim", "c1", ...names]);
  const { page, line, text, dim, c1: single } = colors;
  return { page, line, text, dim, single, layers: names.map((name) => colors[name]) };
}
