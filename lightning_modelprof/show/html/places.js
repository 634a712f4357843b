// Places in code: one click copies file:line, and a flyout shows the call stack if it's known.

import { copyText } from "./copying.js";

/** @typedef {{name: string, at: string}} Call a function, and its file:line; "" if unknown */

const AT = /[^\s"'(),]+\.[A-Za-z]\w*:\d+/;
const SEEN_MS = 1500; // how long "Copied" is shown

/**
 * Make every file:line of findings in `root` a button that copies it.
 * @param {ParentNode} root
 */
export function connectPlaces(root) {
  for (const code of root.querySelectorAll("code.at")) code.replaceWith(placeButton(code.textContent ?? ""));
  for (const item of root.querySelectorAll(".places li")) connectStack(/** @type {HTMLElement} */ (item));
}

/**
 * @param {string} at such as "train.py:12"
 * @param {string} text its label
 */
export function placeButton(at, text = at) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "at";
  button.title = at === text ? "Copy" : `Copy ${at}`;
  button.textContent = text;
  button.addEventListener("click", (event) => {
    event.stopPropagation(); // the elements below handle their own clicks
    copyPlace(button, at);
  });
  return button;
}

/**
 * @param {HTMLElement} from where the reader is looking
 * @param {string} text
 */
export async function copyPlace(from, text) {
  tell(from, (await copyText(text)) ? "Copied" : "The browser doesn't allow copying");
}

/**
 * A text in which a place is a button that copies it.
 * @param {string} text
 * @param {string} whole the full text, because names may be cut
 * @returns {(Node | string)[]}
 */
export function textWithPlace(text, whole) {
  const at = whole.includes(":") && text.trim() ? AT.exec(whole)?.[0] : undefined;
  if (at === undefined) return [text];
  const start = text.indexOf(at);
  if (start < 0) return [placeButton(at, text)];
  return [text.slice(0, start), placeButton(at), text.slice(start + at.length)].filter((part) => part !== "");
}

/**
 * Show the line inside, the line itself, and the line that led to it.
 * @param {HTMLElement} item
 */
function connectStack(item) {
  const calls = [".inner", ".line", ".call"].flatMap((kind) => {
    const place = item.querySelector(kind);
    const at = place?.querySelector(".at")?.textContent ?? "";
    return place ? [{ at, name: (place.textContent ?? "").replace(at, "").trim() }] : [];
  });
  if (calls.length < 2) return;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "to-stack";
  button.textContent = "Call stack";
  button.setAttribute("aria-haspopup", "dialog");
  button.addEventListener("click", () => openStack(button, calls));
  item.append(" ", button);
}

/** @type {HTMLElement | undefined} */
let flyout;

/**
 * Show a call stack next to `from`, until Escape or a click elsewhere.
 * @param {HTMLElement} from gets the focus back
 * @param {Call[]} calls innermost first
 */
export function openStack(from, calls) {
  flyout?.remove();
  const stack = document.createElement("div");
  stack.className = "stack";
  stack.popover = "auto";
  stack.tabIndex = -1;
  stack.setAttribute("role", "dialog");
  stack.setAttribute("aria-label", "Call stack, innermost first");
  const head = document.createElement("header");
  const heading = document.createElement("h2");
  heading.textContent = "Call stack, innermost first";
  const all = document.createElement("button");
  all.type = "button";
  all.textContent = "Copy all";
  const lines = calls.map(({ name, at }) => [at, name].filter(Boolean).join(" "));
  all.addEventListener("click", () => copyPlace(all, lines.join("\n")));
  head.append(heading, all);
  const list = document.createElement("ol");
  list.append(...calls.map(callItem));
  const said = document.createElement("output");
  stack.append(head, list, said);
  stack.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    stack.hidePopover();
    from.focus({ preventScroll: true });
  });
  stack.addEventListener("toggle", (event) => {
    if (/** @type {ToggleEvent} */ (event).newState === "closed") stack.remove();
  });
  document.body.append(stack);
  flyout = stack;
  stack.showPopover();
  placeBeside(stack, from.getBoundingClientRect());
  stack.focus({ preventScroll: true });
}

/** @param {Call} call */
function callItem({ name, at }) {
  const item = document.createElement("li");
  const label = document.createElement("bdi");
  label.textContent = name;
  item.append(...(at ? [placeButton(at), " "] : []), label);
  return item;
}

/**
 * Place it below, or above if there's more room.
 * @param {HTMLElement} element
 * @param {DOMRect} at
 */
function placeBeside(element, at) {
  const margin = 8;
  const [below, above] = [innerHeight - at.bottom, at.top].map((room) => room - 2 * margin);
  element.style.maxHeight = `${Math.max(below, above, 120)}px`;
  const { offsetWidth: width, offsetHeight: height } = element;
  const top = height <= below || below >= above ? at.bottom + margin : at.top - margin - height;
  element.style.left = `${Math.max(margin, Math.min(at.left, innerWidth - width - margin))}px`;
  element.style.top = `${Math.max(margin, top)}px`;
}

/** @type {HTMLElement | undefined} */
let bubble;
let saidTimer = 0;

/**
 * Show it next to `from` and tell screen readers, which need the region to exist before its words.
 * @param {HTMLElement} from
 * @param {string} words
 */
function tell(from, words) {
  /** @type {HTMLElement | null | undefined} */
  let region = from.closest(".stack")?.querySelector("output");
  if (!region) {
    if (!bubble?.isConnected) {
      bubble = document.createElement("output");
      bubble.className = "copied";
      document.body.append(bubble);
    }
    const { left, top } = from.getBoundingClientRect();
    bubble.style.left = `${Math.max(4, Math.min(left, innerWidth - 80))}px`;
    bubble.style.top = `${Math.max(4, top - 30)}px`;
    region = bubble;
  }
  const said = region;
  said.textContent = "";
  requestAnimationFrame(() => (said.textContent = words)); // so that a repeated word is announced
  clearTimeout(saidTimer);
  saidTimer = window.setTimeout(() => (said.textContent = ""), SEEN_MS);
}
