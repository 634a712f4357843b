// Slice colors: the category's, in a shade that depends on the name. Idle time is paler, without shades; the critical
// path, whose slices are parts of others, is darker.

import { NAMELESS, meaningOf, pageColors } from "../page_colors.js";

const PLAIN = ["page", "raised", "line", "text", "dim", "link", "bar"];
const SHADES = [-0.18, 0.18, 0, 0.34, -0.3, 0.1, 0.26, -0.09]; // towards black or white
const PURE = SHADES.indexOf(0);
const IDLE = 0.55; // share of the color in idle time, which is paler than work of that meaning
const PATH = 0.7; // share of the color on the critical path, the rest is black
const LEVELS = 16; // of paleness, by the busy share of a pixel
const PALEST = 0.3;
const DIMMED = 0.16;
const COUNTER = "c1"; // of curves

/** @typedef {[number, number, number]} Rgb 0 to 255 */

/** @type {Rgb[]} */
const [BLACK, WHITE] = [[0, 0, 0], [255, 255, 255]];

export class Palette {
  /**
   * @param {HTMLElement} element whose theme counts
   * @param {import("./slices.js").Slices} slices
   */
  constructor(element, { categories, isIdle, isPath, names }) {
    this.isIdle = isIdle;
    this.isPath = isPath;
    this.shades = Uint8Array.from(names, (name) => hash(name) % SHADES.length);
    this.variables = variablesOf(categories); // of the page, without dashes
    this.page = this.raised = this.counterLine = this.counterArea = 0;
    this.pixels = new Uint32Array(categories.length * SHADES.length * LEVELS);
    this.dimmed = new Uint32Array(this.pixels.length); // for slices that don't match the search
    /** @type {string[]} by color: black or white */
    this.texts = [];
    /** @type {Record<string, string>} */
    this.css = {};
    this.read(element);
  }

  /**
   * Read the page's current colors.
   * @param {HTMLElement} element
   */
  read(element) {
    const colors = pageColors(element, [...PLAIN, COUNTER, ...this.variables]);
    /** @param {string} name */
    const rgb = (name) => numbers(colors[name]);
    const page = rgb("page");
    this.page = packed(page);
    this.raised = packed(rgb("raised"));
    this.counterLine = packed(rgb(COUNTER));
    this.counterArea = packed(mixed(page, rgb(COUNTER), 0.35));
    this.css = Object.fromEntries(PLAIN.map((name) => [name, text(rgb(name))]));
    this.texts = [];
    this.variables.forEach((variable, category) => {
      const pure = rgb(variable);
      const color = this.isIdle[category] ? mixed(page, pure, IDLE) : this.isPath[category] ? mixed(BLACK, pure, PATH) : pure;
      SHADES.forEach((shade, place) => {
        const full = mixed(color, shade < 0 ? BLACK : WHITE, Math.abs(shade));
        this.texts.push(textOn(full));
        for (let level = 0; level < LEVELS; level += 1) {
          const share = PALEST + ((1 - PALEST) * level) / (LEVELS - 1);
          const at = (category * SHADES.length + place) * LEVELS + level;
          this.pixels[at] = packed(mixed(page, full, share));
          this.dimmed[at] = packed(mixed(page, full, share * DIMMED));
        }
      });
    });
  }

  /**
   * A category's color, in CSS.
   * @param {number} category
   */
  swatchOf(category) {
    const color = `var(--${this.variables[category]})`;
    if (this.isIdle[category]) return `color-mix(in srgb, ${color} ${100 * IDLE}%, var(--page))`;
    return this.isPath[category] ? `color-mix(in srgb, ${color} ${100 * PATH}%, black)` : color;
  }

  /**
   * A slice's color, as an index into this palette.
   * @param {number} category
   * @param {number} name
   */
  colorOf(category, name) {
    return category * SHADES.length + (this.isIdle[category] ? PURE : this.shades[name]);
  }

  /**
   * Index in `pixels` of a color that fills a share of a pixel.
   * @param {number} color
   * @param {number} share 0 to 1
   */
  pixelOf(color, share) {
    return color * LEVELS + Math.round(Math.min(1, Math.max(0, share)) * (LEVELS - 1));
  }
}

/**
 * The colors that their meanings have in all views; the others get the next one without a meaning.
 * @param {string[]} categories
 */
function variablesOf(categories) {
  let used = 0;
  return categories.map((category) => meaningOf(category) || NAMELESS[used++ % NAMELESS.length]);
}

/**
 * FNV-1a.
 * @param {string} name
 */
function hash(name) {
  let value = 0x811c9dc5;
  for (let place = 0; place < name.length; place += 1) {
    value = Math.imul(value ^ name.charCodeAt(place), 0x01000193);
  }
  return (value ^ (value >>> 15)) >>> 0;
}

/**
 * @param {string} color in the browser's computed form
 * @returns {Rgb}
 */
function numbers(color) {
  const found = color.match(/[\d.]+/g)?.map(Number) ?? [];
  const scale = color.startsWith("color(") ? 255 : 1;
  return [(found[0] ?? 0) * scale, (found[1] ?? 0) * scale, (found[2] ?? 0) * scale];
}

/**
 * @param {Rgb} color
 * @param {Rgb} other
 * @param {number} share of the other color
 * @returns {Rgb}
 */
function mixed(color, other, share) {
  const [red, green, blue] = color.map((value, place) => value + (other[place] - value) * share);
  return [red, green, blue];
}

/** @param {Rgb} color */
function text([red, green, blue]) {
  return `rgb(${Math.round(red)} ${Math.round(green)} ${Math.round(blue)})`;
}

/**
 * As ImageData stores it on little-endian machines, which all machines with browsers are.
 * @param {Rgb} color
 */
function packed([red, green, blue]) {
  return ((255 << 24) | (Math.round(blue) << 16) | (Math.round(green) << 8) | Math.round(red)) >>> 0;
}

/**
 * Black or white, whichever has more contrast (WCAG); one of them always has at least 4.5.
 * @param {Rgb} color
 */
function textOn(color) {
  const [red, green, blue] = color.map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) ? "#000" : "#fff";
}
