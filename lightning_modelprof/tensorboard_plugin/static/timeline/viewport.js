// The visible time range, and its width in pixels.

const SHORTEST = 50; // nanoseconds in view
const MARGIN = 0.05; // share of the visible range, before and after the trace

export class Viewport {
  /**
   * @param {number} first of the trace
   * @param {number} last of the trace
   */
  constructor(first, last) {
    this.first = first;
    this.last = last;
    this.width = 1; // CSS pixels
    this.begin = 0;
    this.end = 1;
    this.showAll();
  }

  get perPixel() {
    return (this.end - this.begin) / this.width;
  }

  showAll() {
    this.show(this.first, this.last);
  }

  /**
   * @param {number} begin
   * @param {number} end
   */
  show(begin, end) {
    const span = Math.min(Math.max(SHORTEST, end - begin), (this.last - this.first) * (1 + 2 * MARGIN));
    const margin = MARGIN * span;
    const centred = (begin + end - span) / 2;
    this.begin = Math.min(Math.max(centred, this.first - margin), this.last + margin - span);
    this.end = this.begin + span;
  }

  /**
   * Show a slice with some context.
   * @param {number} begin
   * @param {number} end
   */
  showAround(begin, end) {
    const space = Math.max(SHORTEST, (end - begin) * 0.1);
    this.show(begin - space, end + space);
  }

  /**
   * @param {number} factor below 1 to see less time
   * @param {number} x the pixel whose time stays in place
   */
  zoom(factor, x) {
    const span = Math.max(SHORTEST, (this.end - this.begin) * factor);
    const begin = this.timeAt(x) - (x / this.width) * span;
    this.show(begin, begin + span);
  }

  /** @param {number} pixels to the right */
  pan(pixels) {
    const shift = pixels * this.perPixel;
    this.show(this.begin + shift, this.end + shift);
  }

  /** @param {number} x */
  timeAt(x) {
    return this.begin + x * this.perPixel;
  }

  /** @param {number} time */
  xOf(time) {
    return (time - this.begin) / this.perPixel;
  }

  /**
   * Move only as far as needed to show it.
   * @param {number} begin
   * @param {number} end
   */
  bringIn(begin, end) {
    if (begin >= this.begin && end <= this.end) return;
    const span = this.end - this.begin;
    if (end - begin > 0.9 * span) this.showAround(begin, end);
    else this.show((begin + end - span) / 2, (begin + end + span) / 2);
  }
}
