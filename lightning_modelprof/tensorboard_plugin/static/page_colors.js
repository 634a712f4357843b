// The colours of the page, resolved for a canvas, which knows no CSS variables.

/** Names of the colours of what has no meaning of its own. */
export const NAMELESS = Array.from({ length: 7 }, (_, number) => `c${number + 1}`);

/**
 * Name of the colour that a word stands for in all views, such as "m-kernel"; "" if it has none.
 * @param {string} word such as the kind of a slice
 */
export function meaningOf(word) {
  const name = `m-${word.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`) ? name : "";
}

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
