// Pointer and wheel input.

import { AXIS, MAP } from "./head.js";
import { listenToKeys } from "./keys.js";
import { showTooltip } from "./tooltip.js";

/** @typedef {import("./timeline_view.js").TimelineView} TimelineView */

const CLICK = 3; // pixels that a pointer may move in a click
const ZOOM_PER_PIXEL = 0.002;
const LINE = 16; // pixels, for wheels that count lines
const MOST_WHEEL = 300;

/**
 * @param {TimelineView} view
 * @returns {() => void} stops listening
 */
export function listen(view) {
  const { canvas, head, scroller } = view.parts;
  const ends = new AbortController();
  const { signal } = ends;
  canvas.addEventListener("pointerdown", (event) => pressBody(view, event), { signal });
  canvas.addEventListener("pointermove", (event) => point(view, event), { signal });
  canvas.addEventListener("pointerleave", () => leave(view), { signal });
  canvas.addEventListener("dblclick", (event) => {
    view.zoomToSlice(view.sliceAt(event.offsetX, event.offsetY));
  }, { signal });
  canvas.addEventListener("wheel", (event) => turn(view, event), { signal, passive: false });
  head.addEventListener("wheel", (event) => turn(view, event), { signal, passive: false });
  head.addEventListener("pointerdown", (event) => pressHead(view, event), { signal });
  head.addEventListener("pointermove", (event) => {
    head.style.cursor = event.offsetY < MAP ? "grab" : event.offsetY < MAP + AXIS ? "col-resize" : "pointer";
  }, { signal });
  scroller.addEventListener("scroll", () => view.drawNow(), { signal }); // in the same frame as the labels
  listenToKeys(view, signal);
  return () => ends.abort();
}

/**
 * @param {TimelineView} view
 * @param {WheelEvent} event
 */
function turn(view, event) {
  const { scroller } = view.parts;
  const scale = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? LINE : 1;
  const canScroll = scroller.scrollHeight > scroller.clientHeight && event.currentTarget === view.parts.canvas;
  const across = event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX;
  if (event.ctrlKey || event.metaKey || (!canScroll && !event.shiftKey && !event.deltaX)) {
    const way = Math.max(-MOST_WHEEL, Math.min(MOST_WHEEL, event.deltaY * scale));
    view.viewport.zoom(Math.exp(way * ZOOM_PER_PIXEL), event.offsetX);
  } else if (event.shiftKey || Math.abs(across) > Math.abs(event.deltaY)) {
    view.viewport.pan(across * scale);
  } else {
    return; // the browser scrolls
  }
  event.preventDefault();
  view.changed();
}

/**
 * @param {TimelineView} view
 * @param {PointerEvent} event
 */
function pressBody(view, event) {
  if (event.button !== 0) return;
  const { canvas, scroller } = view.parts;
  leave(view);
  if (event.shiftKey) {
    selectRange(view, canvas, event);
    return;
  }
  const [begin, end, top] = [view.viewport.begin, view.viewport.end, scroller.scrollTop];
  const { perPixel } = view.viewport;
  drag(canvas, event, (x, y) => {
    const shift = Math.round(x) * perPixel; // whole pixels, to avoid flicker
    view.viewport.show(begin - shift, end - shift);
    scroller.scrollTop = top - y;
    canvas.style.cursor = "grabbing";
    view.changed();
  }, (isClick) => {
    canvas.style.cursor = "";
    if (isClick) view.select(view.sliceAt(event.offsetX, event.offsetY), true);
  });
}

/**
 * @param {TimelineView} view
 * @param {PointerEvent} event
 */
function pressHead(view, event) {
  if (event.button !== 0) return;
  const { head } = view.parts;
  const { viewport } = view;
  if (event.offsetY >= MAP) {
    selectRange(view, head, event);
    return;
  }
  /** @param {number} x */
  const centre = (x) => {
    const middle = viewport.first + (x / viewport.width) * (viewport.last - viewport.first);
    const half = (viewport.end - viewport.begin) / 2;
    view.zoomTo(middle - half, middle + half);
  };
  const start = event.offsetX;
  centre(start);
  drag(head, event, (x) => centre(start + x), () => {});
}

/**
 * A drag selects a time range. A click on a step zooms to it; any other click clears the range.
 * @param {TimelineView} view
 * @param {HTMLElement} element
 * @param {PointerEvent} event
 */
function selectRange(view, element, event) {
  const from = view.viewport.timeAt(event.offsetX);
  const start = event.offsetX;
  drag(element, event, (x) => {
    const to = view.viewport.timeAt(Math.min(view.viewport.width, Math.max(0, start + x)));
    view.setRange([Math.min(from, to), Math.max(from, to)]);
  }, (isClick) => {
    if (!isClick) return;
    const step = view.slices.stepAt(from);
    const isOnSteps = element === view.parts.head && event.offsetY >= MAP + AXIS;
    if (isOnSteps && step) view.zoomTo(step.begin, step.end);
    else view.setRange(null);
  });
}

/**
 * @param {HTMLElement} element
 * @param {PointerEvent} start
 * @param {(x: number, y: number) => void} onMove with the distance from the start
 * @param {(isClick: boolean) => void} onEnd
 */
function drag(element, start, onMove, onEnd) {
  element.setPointerCapture(start.pointerId);
  const ends = new AbortController();
  const { signal } = ends;
  let isClick = true;
  element.addEventListener("pointermove", (event) => {
    const [x, y] = [event.clientX - start.clientX, event.clientY - start.clientY];
    if (Math.hypot(x, y) > CLICK) isClick = false;
    if (!isClick) onMove(x, y);
  }, { signal });
  element.addEventListener("pointerup", () => {
    ends.abort();
    onEnd(isClick);
  }, { signal });
  element.addEventListener("pointercancel", () => ends.abort(), { signal });
}

/**
 * @param {TimelineView} view
 * @param {PointerEvent} event
 */
function point(view, event) {
  if (event.buttons) return;
  const box = view.parts.stage.getBoundingClientRect();
  const index = view.sliceAt(event.offsetX, event.offsetY);
  view.parts.canvas.style.cursor = index >= 0 ? "pointer" : "";
  view.pointed = view.viewport.timeAt(event.offsetX);
  showTooltip(view, event.clientX - box.left, event.clientY - box.top, index);
  if (view.slices.counters.length) view.showPointed();
}

/** @param {TimelineView} view */
function leave(view) {
  view.pointed = null;
  showTooltip(view, 0, 0, -1);
  view.showPointed();
}
