// The colours of the page, resolved for a canvas, which knows no CSS variables.

/** Names of the colours that tell things apart. */
export const LAYER_COLORS = Array.from({ length: 8 }, (_, number) => `c${number}`);

/**
 * The colours that an element has in the theme of this moment.
 * @param {HTMLElement} element
 * @param {string[]} names of CSS variables, without dashes
 * @returns {Record<string, string>} name → colour, as browsers write computed ones
 */
export function pageColors(element, names) {
  const probe = document.createElement("i");
  element.append(probe);
  const colors = names.map((name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color];
  });
  probe.remove();
  return Object.fromEntries(colors);
}
