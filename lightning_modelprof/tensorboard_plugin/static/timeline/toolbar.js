// The line above the timeline: search, and actions on the whole trace.

import { make } from "../dom.js";
import { formatCount } from "../format.js";
import { copyText } from "../html/copying.js";
import { openInPerfetto, saveFile } from "./perfetto.js";

/** @typedef {import("./timeline_view.js").TimelineView} TimelineView */
/** @typedef {{file: string, where: string, which: string, load: () => Promise<Blob>}} TraceFile `file`: its name; `where`: where it is instead; `which`: of multiple ranks */

const AFTER_TYPING_MS = 120;

/**
 * @param {TimelineView} view
 * @returns {() => void} stops pending work
 */
export function fillToolbar(view) {
  const { parts, title, trace, linkTo } = view;
  /** @param {string} text */
  const say = (text) => (parts.message.textContent = text);
  let stop = () => {};
  const perfetto = () => {
    stop();
    if (trace) stop = openInPerfetto(trace.load, title, say);
  };
  const copyLink = async () => {
    const isDone = linkTo !== undefined && (await copyText(linkTo(view.look())));
    say(isDone ? "Link copied." : "The browser doesn't allow copying.");
  };
  const download = async () => {
    say("Loading the trace…");
    try {
      if (trace) saveFile(await trace.load(), trace.file);
      say("");
    } catch (error) {
      say(`Can't load the trace: ${error instanceof Error ? error.message : error}`);
    }
  };
  /**
   * @param {string} label
   * @param {string} title
   * @param {() => void} onclick
   * @param {Record<string, string>} [attributes]
   */
  const button = (label, title, onclick, attributes = {}) =>
    make("button", { type: "button", title, onclick, ...attributes }, label);
  parts.buttons.append(
    button("Previous", "Previous match (Shift+Enter)", () => view.nextFound(-1), { class: "tl-found" }),
    button("Next", "Next match (Enter)", () => view.nextFound(1), { class: "tl-found" }),
    button("Show all", "Show the whole trace (0)", () => view.showAll()),
    ...(linkTo ? [button("Copy link", "Copy a link to this zoom, selection and search", copyLink)] : []),
    ...(trace?.file
      ? [
          button(`Open in Perfetto${trace.which}`, "Open the trace in a new ui.perfetto.dev tab", perfetto),
          button(`Download .json.gz${trace.which}`, `Download ${trace.file}`, download),
        ]
      : []),
    button("?", "Keyboard shortcuts (?)", () => parts.help.showModal(), { "aria-label": "Keyboard shortcuts" }),
  );
  if (trace?.where) parts.bar.append(make("span", { class: "tl-where" }, trace.where));
  parts.search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      search();
      if (view.nextFound(event.shiftKey ? -1 : 1)) view.zoomToLinked();
    } else if (event.key === "Escape") {
      parts.search.value = "";
      search();
      parts.canvas.focus();
    }
  });
  let timer = 0;
  const search = () => {
    clearTimeout(timer);
    if (parts.search.value !== view.search) view.setSearch(parts.search.value);
  };
  parts.search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = window.setTimeout(search, AFTER_TYPING_MS);
  });
  return () => {
    clearTimeout(timer);
    stop();
  };
}

/** @param {TimelineView} view */
export function showFound({ parts, found, at: selected }) {
  const isAt = found.isActive && found.has(selected);
  const place = isAt ? `${formatCount(found.placeOf(selected) + 1)} of ` : "";
  parts.count.value = found.isActive ? `${place}${formatCount(found.count)}` : "";
  for (const one of parts.buttons.querySelectorAll(".tl-found")) {
    /** @type {HTMLButtonElement} */ (one).disabled = found.count === 0;
  }
}
