// The colours of the charts.

import { LAYER_COLORS, pageColors } from "../page_colors.js";

/**
 * @typedef {Object} Palette
 * @property {string} page
 * @property {string} line
 * @property {string} text
 * @property {string} dim
 * @property {string[]} layers the colours --c0 to --c7
 */

/**
 * Read the colours that an element has in the theme of this moment.
 * @param {HTMLElement} element
 * @returns {Palette}
 */
export function readPalette(element) {
  const { page, line, text, dim, ...layers } = pageColors(element, ["page", "line", "text", "dim", ...LAYER_COLORS]);
  return { page, line, text, dim, layers: LAYER_COLORS.map((name) => layers[name]) };
}
