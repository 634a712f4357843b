// The reader's choice is in the address, so that a link leads back to it. TensorBoard keeps names that start with
// "p.<name of the plugin>." in its page's fragment; alone, as in tests, it's this page's own fragment.

const PREFIX = "p.modelprof.";

/** @typedef {Record<string, string>} Choice name → value; names without a value aren't set */

/** The page whose address the reader sees. */
function outerPage() {
  try {
    return window.parent.location.href ? window.parent : window;
  } catch {
    return window; // embedded in another site's page
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
      // A truncated or mistyped link selects its readable part.
    }
  }
  return choice;
}

/**
 * Parse JSON from the address; undefined if there is none or it's mistyped.
 * @param {string | undefined} text
 * @returns {any}
 */
export function parseLink(text) {
  try {
    const value = text ? JSON.parse(text) : undefined;
    return typeof value === "object" && value !== null ? value : undefined;
  } catch {
    return undefined;
  }
}

/**
 * The address with a choice in it; TensorBoard's own parts stay.
 * @param {Choice} choice
 */
export function addressOf(choice) {
  const { href, hash } = outerPage().location;
  const others = hash
    .slice(1)
    .split("&")
    .filter((part) => part && !part.startsWith(PREFIX));
  const ours = Object.entries(choice)
    .filter(([, value]) => value !== "")
    .map(([name, value]) => `${PREFIX}${encodeURIComponent(name)}=${encodeURIComponent(value)}`);
  return `${href.split("#", 1)[0]}#${[...others, ...ours].join("&")}`;
}

/**
 * A short address of a choice for sharing: without TensorBoard's state of other tabs, and with only the necessary
 * characters escaped.
 * @param {Choice} choice
 */
export function shortAddressOf(choice) {
  const [page, fragment] = addressOf(choice).split("#");
  const parts = fragment.split("&").filter((part) => part.startsWith(PREFIX) || !part.includes("="));
  return `${page}#${parts.join("&").replace(/%(?:2C|2F|3A)/g, decodeURIComponent)}`;
}

/**
 * Put a choice into the address. The rest of a history entry is TensorBoard's, which looks for it there.
 * @param {Choice} choice
 * @param {boolean} isStep whether going back leads to the previous choice
 */
export function writeLink(choice, isStep) {
  const { history, location } = outerPage();
  const address = addressOf(choice);
  if (address === location.href) return;
  if (isStep) history.pushState(history.state, "", address);
  else history.replaceState(history.state, "", address);
}

/**
 * Call `listener` when the address changes in other ways: the reader goes back, or edits it.
 * @param {() => void} listener
 */
export function onLinkChange(listener) {
  outerPage().addEventListener("hashchange", listener);
}

/**
 * The choice that a part of the page links to: from `data-goto`, with objects as JSON for the address.
 * @param {Element} anchor
 * @returns {Choice}
 */
function gotoOf(anchor) {
  const wanted = Object.entries(JSON.parse(anchor.getAttribute("data-goto") ?? "{}"));
  return Object.fromEntries(
    wanted.map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)]),
  );
}

/**
 * Follow links into another view. Before it's pressed, a link gets the address it leads to, for opening in a new tab.
 * @param {(changes: Choice) => Choice} preview the choice that it leads to
 * @param {(changes: Choice) => void} follow
 */
export function onGoto(preview, follow) {
  const anchorOf = (/** @type {Event} */ event) =>
    event.target instanceof Element ? event.target.closest("[data-goto]") : null;
  const address = (/** @type {Event} */ event) => {
    const anchor = anchorOf(event);
    if (!(anchor instanceof HTMLAnchorElement)) return;
    anchor.href = addressOf(preview(gotoOf(anchor)));
    anchor.target = "_top";
  };
  document.addEventListener("pointerover", address);
  document.addEventListener("focusin", address);
  document.addEventListener("click", (event) => {
    const anchor = anchorOf(event);
    if (!anchor || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    follow(gotoOf(anchor));
  });
}
