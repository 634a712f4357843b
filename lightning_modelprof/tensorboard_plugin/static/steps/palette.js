// The colours of the page, resolved for a canvas, which knows no CSS variables.

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
  const probe = document.createElement("i");
  element.append(probe);
  const read = (/** @type {string} */ name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const palette = {
    page: read("page"),
    line: read("line"),
    text: read("text"),
    dim: read("dim"),
    layers: Array.from({ length: 8 }, (_, number) => read(`c${number}`)),
  };
  probe.remove();
  return palette;
}
