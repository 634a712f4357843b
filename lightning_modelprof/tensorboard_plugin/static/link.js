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
 * What stands in the address as JSON; undefined where there is nothing, or what somebody mistyped.
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
 * The address with a choice in it; what is TensorBoard's own in it stays.
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
 * A short address of a choice, to send to somebody: without what TensorBoard keeps of its other tabs, and with only
 * those characters escaped that have to be.
 * @param {Choice} choice
 */
export function shortAddressOf(choice) {
  const [page, fragment] = addressOf(choice).split("#");
  const parts = fragment.split("&").filter((part) => part.startsWith(PREFIX) || !part.includes("="));
  return `${page}#${parts.join("&").replace(/%(?:2C|2F|3A)/g, decodeURIComponent)}`;
}

/**
 * Put a choice into the address. What else is in an entry of the history is TensorBoard's, which looks for it there.
 * @param {Choice} choice
 * @param {boolean} isStep whether going back leads to what was there before
 */
export function writeLink(choice, isStep) {
  const { history, location } = outerPage();
  const address = addressOf(choice);
  if (address === location.href) return;
  if (isStep) history.pushState(history.state, "", address);
  else history.replaceState(history.state, "", address);
}

/**
 * Call `listener` when the address changes otherwise: the reader goes back, or writes in it.
 * @param {() => void} listener
 */
export function onLinkChange(listener) {
  outerPage().addEventListener("hashchange", listener);
}

/**
 * What a part of the page links to: `data-goto` holds choices, of which those that are objects stand in the address
 * as JSON.
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
 * Follow links into another view. Until one is pressed it gets the address it leads to, for a tab of its own.
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
