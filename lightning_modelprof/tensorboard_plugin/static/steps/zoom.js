// The visible range of steps.

const LEAST = 1;

/** A range of steps within a run; both ends are inclusive. */
export class Zoom {
  /** @param {number} count steps of the run, at least one */
  constructor(count) {
    this.count = count;
    this.first = 0;
    this.last = count - 1;
  }

  get isWhole() {
    return this.first === 0 && this.last === this.count - 1;
  }

  get length() {
    return this.last - this.first + 1;
  }

  reset() {
    this.set(0, this.count - 1);
  }

  /**
   * Show these steps; a range that sticks out is moved inside.
   * @param {number} first
   * @param {number} last
   */
  set(first, last) {
    const length = Math.min(this.count, Math.max(LEAST, Math.round(last) - Math.round(first) + 1));
    this.first = Math.max(0, Math.min(this.count - length, Math.round(first)));
    this.last = this.first + length - 1;
  }

  /**
   * Show `factor` times as many steps; `center` stays in place.
   * @param {number} factor
   * @param {number} center
   */
  scale(factor, center) {
    const length = Math.max(LEAST, Math.round(this.length * factor));
    const wanted = factor > 1 ? Math.max(length, this.length + 2) : length;
    const share = this.length > 1 ? (center - this.first) / (this.length - 1) : 0.5;
    const first = center - share * (wanted - 1);
    this.set(first, Math.round(first) + wanted - 1);
  }

  /**
   * Move by a share of the range, at least by one step.
   * @param {number} share negative: to earlier ones
   */
  pan(share) {
    const by = Math.sign(share) * Math.max(1, Math.round(Math.abs(share) * this.length));
    this.set(this.first + by, this.last + by);
  }
}
