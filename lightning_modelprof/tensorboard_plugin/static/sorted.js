// Places in sorted lists. The search starts near its start, so going from place to place is cheap.

/**
 * The first place in [from, to) where it's true, else `to`; after that it must stay true.
 * @param {number} from
 * @param {number} to
 * @param {(place: number) => boolean} isTrue
 */
export function firstWhere(from, to, isTrue) {
  if (from >= to || isTrue(from)) return from;
  let low = from; // not true here
  let stride = 1;
  while (low + stride < to && !isTrue(low + stride)) {
    low += stride;
    stride *= 2;
  }
  let high = Math.min(to, low + stride); // true here, or the end
  while (high - low > 1) {
    const middle = (low + high) >>> 1;
    if (isTrue(middle)) high = middle;
    else low = middle;
  }
  return high;
}

/**
 * The first place in [from, to) whose value is above the limit, else `to`.
 * @param {ArrayLike<number>} values ascending
 * @param {number} from
 * @param {number} to
 * @param {number} limit
 */
export function firstAbove(values, from, to, limit) {
  return firstWhere(from, to, (place) => values[place] > limit);
}

/**
 * The first place in [from, to) whose value is at least the limit, else `to`.
 * @param {ArrayLike<number>} values ascending
 * @param {number} from
 * @param {number} to
 * @param {number} limit
 */
export function firstFrom(values, from, to, limit) {
  return firstWhere(from, to, (place) => values[place] >= limit);
}
