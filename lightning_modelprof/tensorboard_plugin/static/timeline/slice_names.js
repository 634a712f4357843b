// Names inside slices, as much of them as fits.

const ELLIPSIS = "…";
const FEWEST = 3; // letters; fewer are meaningless
const PAD = 3; // pixels
const BEFORE_A_NAME = /^(?:void |modelprof: )/;
const NAMESPACE = /(?:\b\w+|\(anonymous namespace\))::/g;

export const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif";
export const LEAST_WIDTH = 26; // pixels of a slice with a name

export class SliceNames {
  /** @param {string[]} names */
  constructor(names) {
    this.names = names;
    /** @type {Map<number, {text: string, width: number}[]>} by name: in full, and without prefixes */
    this.known = new Map();
  }

  /**
   * @param {CanvasRenderingContext2D} context in CSS pixels, its color set
   * @param {number} name
   * @param {number} x
   * @param {number} stop
   * @param {number} y of its middle
   */
  draw(context, name, x, stop, y) {
    const room = stop - x - 2 * PAD;
    const forms = this.known.get(name) ?? this.measure(context, name);
    const { text, width } = forms.find((form) => form.width <= room) ?? forms[forms.length - 1];
    if (width <= room) {
      context.fillText(text, x + PAD, y);
      return;
    }
    const letters = Math.floor((text.length * room) / width) - 1;
    if (letters >= FEWEST) context.fillText(text.slice(0, letters) + ELLIPSIS, x + PAD, y, room);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {number} name
   */
  measure(context, name) {
    const full = this.names[name].slice(0, 400); // no slice has room for more
    const short = full.replace(BEFORE_A_NAME, "").replace(NAMESPACE, "");
    const forms = (short === full ? [full] : [full, short]).map((text) => {
      return { text, width: context.measureText(text).width };
    });
    this.known.set(name, forms);
    return forms;
  }
}
