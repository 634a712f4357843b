// The legend of the stacked chart: values at the cursor, and buttons that show and hide layers.

import { make } from "../dom.js";
import { formatDuration } from "../format.js";

/** @typedef {import("./data.js").Layer} Layer */

/** Buttons for layers; a click shows or hides one, with Alt or Shift it shows only that one. */
export class Legend {
  /**
   * @param {Layer[]} layers
   * @param {Iterable<string>} hidden keys of those hidden at first
   * @param {() => void} onChange
   */
  constructor(layers, hidden, onChange) {
    this.layers = layers;
    this.onChange = onChange;
    const known = new Set(layers.map((layer) => layer.key));
    this.hidden = new Set(Array.from(hidden).filter((key) => known.has(key)));
    this.values = layers.map(() => make("b"));
    this.buttons = layers.map((layer, place) => this.button(layer, this.values[place]));
    // The first layer is at the bottom of the chart, so the legend starts with the last one.
    this.element = make("ul", { class: "legend" }, ...this.buttons.map((one) => make("li", {}, one)).reverse());
    this.mark();
  }

  /**
   * @param {Layer} layer
   * @param {HTMLElement} value
   */
  button(layer, value) {
    const title = "Click to show or hide. Alt+click or Shift+click to show only this one.";
    const button = make("button", { type: "button", class: layer.color, title }, make("i"), layer.label, " ", value);
    button.addEventListener("click", (event) => {
      if (event.altKey || event.shiftKey) this.showAlone(layer.key);
      else if (!this.hidden.delete(layer.key)) this.hidden.add(layer.key);
      this.mark();
      this.onChange();
    });
    return button;
  }

  /**
   * Show only this layer, or all if it's already the only one.
   * @param {string} key
   */
  showAlone(key) {
    const others = this.layers.map((layer) => layer.key).filter((other) => other !== key);
    const isAlone = !this.hidden.has(key) && others.every((other) => this.hidden.has(other));
    this.hidden = new Set(isAlone ? [] : others);
  }

  mark() {
    this.layers.forEach((layer, place) => {
      this.buttons[place].setAttribute("aria-pressed", String(!this.hidden.has(layer.key)));
    });
  }

  /**
   * Indices of the visible layers.
   * @returns {number[]}
   */
  shown() {
    return this.layers.flatMap((layer, place) => (this.hidden.has(layer.key) ? [] : [place]));
  }

  /** @param {(number | null)[] | null} times of each layer, in ns; null for none */
  show(times) {
    this.values.forEach((value, place) => {
      const time = times && times[place];
      value.textContent = time === null || Number.isNaN(time) ? "" : formatDuration(time);
    });
  }
}
