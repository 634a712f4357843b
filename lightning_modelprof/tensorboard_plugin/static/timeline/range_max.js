// Finds the largest of adjacent numbers without reading all of them.

const FANOUT = 16;

export class RangeMax {
  /** @param {ArrayLike<number>} values */
  constructor(values) {
    this.values = values;
    /** @type {Int32Array[]} each: index of the largest among every FANOUT of the level below */
    this.levels = [];
    let count = values.length;
    while (count > FANOUT) {
      const below = this.levels.at(-1);
      const above = new Int32Array(Math.ceil(count / FANOUT));
      for (let block = 0; block < above.length; block += 1) {
        const to = Math.min(count, (block + 1) * FANOUT);
        let best = below ? below[block * FANOUT] : block * FANOUT;
        for (let place = block * FANOUT + 1; place < to; place += 1) {
          const index = below ? below[place] : place;
          if (values[index] > values[best]) best = index;
        }
        above[block] = best;
      }
      this.levels.push(above);
      count = above.length;
    }
  }

  /**
   * Index of the largest value in [from, to); -1 if the range is empty.
   * @param {number} from
   * @param {number} to
   */
  largest(from, to) {
    const { values, levels } = this;
    let best = -1;
    let largest = -Infinity;
    for (let level = -1; from < to; level += 1) {
      const below = level < 0 ? null : levels[level];
      const isTop = level + 1 === levels.length;
      const isShort = to - from < 2 * FANOUT;
      // Incomplete blocks are searched here, the full ones one level up.
      const stop = isTop || isShort ? to : Math.ceil(from / FANOUT) * FANOUT;
      for (; from < stop; from += 1) {
        const index = below ? below[from] : from;
        if (values[index] > largest) largest = values[(best = index)];
      }
      const restart = isTop || isShort ? to : Math.floor(to / FANOUT) * FANOUT;
      for (let place = restart; place < to; place += 1) {
        const index = below ? below[place] : place;
        if (values[index] > largest) largest = values[(best = index)];
      }
      from = Math.ceil(from / FANOUT);
      to = isTop || isShort ? from : restart / FANOUT;
    }
    return best;
  }
}
