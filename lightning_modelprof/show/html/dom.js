// Building elements.

/**
 * Build an element in one line. Texts become text nodes, so a user's name can never be markup.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} name
 * @param {Record<string, string | boolean | EventListener>} [attributes] "on..." are listeners; false omits one
 * @param {(Node | string)[]} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(key.slice(2), value);
    else if (value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/**
 * A heading, with its definition as a tooltip.
 * @param {string} text
 * @param {string} about "" for none
 */
export function heading(text, about) {
  return make("h2", { title: about || false }, text);
}
