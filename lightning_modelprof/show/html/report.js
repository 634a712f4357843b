// The page around the parts of report.html: its theme, contents, links into it, and printing.

import { connectHead, drawDocument } from "./document.js";

connectHead(document);
const drawn = drawDocument(JSON.parse(document.getElementById("document")?.textContent ?? ""));
document.getElementById("charts")?.append(...drawn.charts);
document.getElementById("flames")?.append(...drawn.flames.map(({ element }) => element));
document.getElementById("tables")?.append(...drawn.tables.map(({ element }) => element));

// Theme: the system's, or the selected one.
const themes = ["auto", "light", "dark"];
const themeButton = /** @type {HTMLElement} */ (document.getElementById("theme"));

/** @param {string} name */
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  themeButton.textContent = `Theme: ${name}`;
}

function storedTheme() {
  try {
    const name = localStorage.getItem("modelprof-theme") ?? "";
    return themes.includes(name) ? name : "auto";
  } catch {
    return "auto"; // browsers may not store anything for files
  }
}

themeButton.addEventListener("click", () => {
  const place = themes.indexOf(document.documentElement.dataset.theme ?? "");
  const name = themes[(place + 1) % themes.length];
  setTheme(name);
  try {
    localStorage.setItem("modelprof-theme", name);
  } catch {
    // it lasts for this visit
  }
});
setTheme(storedTheme());

// Links into folded tables open them.
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  /** @type {HTMLDetailsElement | null | undefined} */
  const details = target?.querySelector(":scope > details");
  if (details) details.open = true;
  return target;
}
addEventListener("hashchange", openTarget);
openTarget()?.scrollIntoView();

// Once their rows exist, the browser's own search finds text in folded tables and opens them.
const later = window.requestIdleCallback ?? setTimeout;
const toFill = [...drawn.tables];
function fillNext() {
  toFill.shift()?.fill();
  if (toFill.length) later(fillNext);
}
requestAnimationFrame(() => later(fillNext)); // after the first paint

// Paper shows everything except the details of findings and checks.
/** @type {HTMLDetailsElement[]} */
let closed = [];
addEventListener("beforeprint", () => {
  closed = Array.from(document.querySelectorAll("main details:not([open]):not(.checks, .more)"));
  for (const details of closed) details.open = true;
  for (const part of [...drawn.flames, ...drawn.tables]) part.print(true);
});
addEventListener("afterprint", () => {
  for (const details of closed) details.open = false;
  for (const part of [...drawn.flames, ...drawn.tables]) part.print(false);
});

const contents = /** @type {HTMLDetailsElement} */ (document.querySelector("nav details"));
if (matchMedia("(max-width: 75rem)").matches) contents.open = false;
