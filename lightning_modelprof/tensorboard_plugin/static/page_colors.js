// The page's colors, resolved for canvases, which don't support CSS variables.

/** Names of the colors without a meaning. */
export const NAMELESS = Array.from({ length: 7 }, (_, number) => `c${number + 1}`);

/**
 * Name of the color that a word has in all views, such as "m-kernel"; "" if it has none.
 * @param {string} word such as the kind of a slice
 */
export function meaningOf(word) {
  const name = `m-${word.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`) ? name : "";
}

/**
 * An element's colors in the current theme.
 * @param {HTMLElement} element
 * @param {string[]} names of CSS variables, without dashes
 * @returns {Record<string, string>} name → color, in the browser's computed form
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
