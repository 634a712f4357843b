// What the reader has chosen stands in the address, so that a link leads back to it. TensorBoard keeps what begins
// with "p.<name of the plugin>." in the fragment of its page; alone, as in tests, it is this page's own fragment.

const PREFIX = "p.modelprof.";

/** @typedef {Record<string, string>} Choice name → value; names without a value are not chosen */

/** The page whose address the reader sees. */
function outerPage() {
  try {
    return window.parent.location.href ? window.parent : window;
  } catch {
    return window; // embedded in a page from elsewhere
  }
}

/** @returns {Choice} */
export function readLink() {
  const choice = /** @type {Choice} */ ({});
  for (const part of outerPage().location.hash.slice(1).split("&")) {
    const [name, value = ""] = part.split("=");
    if (!name.startsWith(PREFIX)) continue;
    try {
      choice[decodeURIComponent(name.slice(PREFIX.length))] = decodeURIComponent(value);
    } catch {
      // A link that somebody cut or mistyped chooses what is left of it.
    }
  }
  return choice;
}

/**
 * Put a choice into the address. The history does not grow: going back leaves the dashboard, as a reader expects.
 * @param {Choice} choice
 */
export function writeLink(choice) {
  const page = outerPage();
  const others = page.location.hash
    .slice(1)
    .split("&")
    .filter((part) => part && !part.startsWith(PREFIX));
  const ours = Object.entries(choice)
    .filter(([, value]) => value !== "")
    .map(([name, value]) => `${PREFIX}${encodeURIComponent(name)}=${encodeURIComponent(value)}`);
  page.history.replaceState(page.history.state, "", `#${[...others, ...ours].join("&")}`);
}

/**
 * Call `listener` when somebody else changes the address, such as the reader.
 * @param {() => void} listener
 */
export function onLinkChange(listener) {
  outerPage().addEventListener("hashchange", listener);
}
