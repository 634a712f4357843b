// Round numbers for the ticks of an axis.

/**
 * The smallest of 1, 2, 5, 10, 20, ... that is at least this.
 * @param {number} least
 */
export function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least - 1e-9 * power) ?? 10 * power;
}
