// The charts' colors.

import { pageColors } from "../page_colors.js";

/**
 * @typedef {Object} Palette
 * @property {string} page
 * @property {string} line
 * @property {string} text
 * @property {string} dim
 * @property {string} single of curves without layers
 * @property {string[]} layers of the layers
 */

/**
 * Read an element's colors in the current theme.
 * @param {HTMLElement} element
 * @param {string[]} names of the layers' colors
 * @returns {Palette}
 */
export function readPalette(element, names) {
  const colors = pageColors(element, ["page", "line", "text", "dim", "c1", ...names]);
  const { page, line, text, dim, c1: single } = colors;
  return { page, line, text, dim, single, layers: names.map((name) => colors[name]) };
}
