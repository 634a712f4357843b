// Numbers as show/format.py writes them: the same text for the same number.
//
// A double is an exact fraction, and so is every unit here; the arithmetic is that of whole numbers, so no digit
// depends on how a browser rounds.

export const DASH = "–"; // a value that was not measured

/** @typedef {{up: bigint, down: bigint}} Fraction both not negative, down not 0 */

/** @type {[bigint, bigint, string][]} from how many nanoseconds on, how many one has, its name */
const DURATIONS = [
  // Minutes and hours start at two, because "75.2 s" is easier to compare than "1.25 min".
  [7_200n * 10n ** 9n, 3_600n * 10n ** 9n, "h"],
  [120n * 10n ** 9n, 60n * 10n ** 9n, "min"],
  [10n ** 9n, 10n ** 9n, "s"],
  [10n ** 6n, 10n ** 6n, "ms"],
  [10n ** 3n, 10n ** 3n, "us"],
  [0n, 1n, "ns"],
];
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
/** @type {[number, string][]} */
const LARGE_COUNTS = [[18, "E"], [15, "P"], [12, "T"]];

/**
 * A duration with its unit: "12.3 ms".
 * @param {number | null} ns
 */
export function formatDuration(ns) {
  if (ns === null || !Number.isFinite(ns)) return withoutDigits(ns);
  const { up, down } = fraction(ns);
  for (const [from, scale, unit] of DURATIONS) {
    if (up >= from * down) return `${sign(ns)}${measured({ up, down: down * scale }, 0)} ${unit}`;
  }
  return DASH;
}

/**
 * A number of bytes with its unit: "1.50 MiB".
 * @param {number | null} bytes
 */
export function formatBytes(bytes) {
  if (bytes === null || !Number.isFinite(bytes)) return withoutDigits(bytes);
  let { up, down } = fraction(bytes);
  let power = 0;
  for (; up >= 1024n * down && power < BYTES.length - 1; power += 1) down *= 1024n;
  const text = power ? measured({ up, down }, 2) : count({ up, down });
  return `${sign(bytes)}${text} ${BYTES[power]}`;
}

/**
 * A count: "12,345", "1.23 T".
 * @param {number | null} value
 */
export function formatCount(value) {
  if (value === null || !Number.isFinite(value)) return withoutDigits(value);
  return sign(value) + count(fraction(value));
}

/**
 * A fraction of 1 as a percentage: "40.22 %".
 * @param {number | null} share
 */
export function formatRatio(share) {
  if (share === null || !Number.isFinite(share)) return `${withoutDigits(share)}${share === null ? "" : " %"}`;
  const { up, down } = fraction(share);
  return `${sign(share)}${measured({ up: up * 100n, down }, 2, 1)} %`;
}

/**
 * A rate, whose unit stands beside it: "4,939", "12.3".
 * @param {number | null} rate
 */
export function formatRate(rate) {
  if (rate === null || !Number.isFinite(rate)) return withoutDigits(rate);
  const { up, down } = fraction(rate);
  const exponent = exponentOf({ up, down });
  // The decimals of a large rate are noise.
  const isLarge = exponent >= 3 && exponent < 15;
  return sign(rate) + (isLarge ? withSeparators(rounded(up, down)) : measured({ up, down }, 2));
}

/** @param {number | null} value */
function withoutDigits(value) {
  if (value === null) return DASH;
  if (Number.isNaN(value)) return "nan";
  return value > 0 ? "inf" : "-inf";
}

/** @param {number} value */
function sign(value) {
  return value < 0 ? "-" : "";
}

/** @param {Fraction} number */
function count({ up, down }) {
  if (up === 0n) return "0";
  const exponent = exponentOf({ up, down });
  if (exponent >= 21) return scientific({ up, down }, exponent);
  for (const [power, suffix] of LARGE_COUNTS) {
    if (exponent >= power) return `${measured({ up, down: down * 10n ** BigInt(power) }, 2)} ${suffix}`;
  }
  if (up % down) return measured({ up, down }, 2);
  return withSeparators(up / down);
}

/**
 * With a comma after every three digits from the right.
 * @param {bigint} whole
 */
function withSeparators(whole) {
  return String(whole).replace(/\B(?=(\d{3})+$)/g, ",");
}

/**
 * At least so many decimals and at least so many digits, so that nothing rounds to zero.
 * @param {Fraction} number
 * @param {number} decimals
 * @param {number} significant
 */
function measured({ up, down }, decimals, significant = 3) {
  if (up === 0n) return "0";
  const exponent = exponentOf({ up, down });
  if (exponent < -7 || exponent >= 15) return scientific({ up, down }, exponent);
  return fixed({ up, down }, Math.max(decimals, significant - 1 - exponent));
}

/**
 * @param {Fraction} number
 * @param {number} decimals
 */
function fixed({ up, down }, decimals) {
  const digits = String(rounded(up * 10n ** BigInt(decimals), down)).padStart(decimals + 1, "0");
  if (!decimals) return digits;
  return `${digits.slice(0, -decimals)}.${digits.slice(-decimals)}`;
}

/**
 * Three digits and a power of ten, as Python writes it: "1.23e+20".
 * @param {Fraction} number
 * @param {number} exponent
 */
function scientific({ up, down }, exponent) {
  const shift = 10n ** BigInt(Math.abs(exponent - 2));
  const digits = exponent > 2 ? rounded(up, down * shift) : rounded(up * shift, down);
  const [three, power] = digits === 1000n ? ["100", exponent + 1] : [String(digits), exponent];
  return `${three[0]}.${three.slice(1)}e${power < 0 ? "-" : "+"}${Math.abs(power)}`;
}

/**
 * The nearest whole number; of two as near the even one, as Python's decimals do.
 * @param {bigint} up
 * @param {bigint} down
 */
function rounded(up, down) {
  const whole = up / down;
  const twice = 2n * (up % down);
  return twice > down || (twice === down && whole % 2n) ? whole + 1n : whole;
}

/**
 * The power of ten of the first digit.
 * @param {Fraction} number above 0
 */
function exponentOf({ up, down }) {
  const guess = String(up).length - String(down).length;
  const power = 10n ** BigInt(Math.abs(guess));
  const isReached = guess >= 0 ? up >= down * power : up * power >= down;
  return isReached ? guess : guess - 1;
}

/**
 * The size of a double as the fraction that it is.
 * @param {number} value finite
 * @returns {Fraction}
 */
function fraction(value) {
  let size = Math.abs(value);
  let down = 1n;
  while (!Number.isInteger(size)) { // each doubling is exact
    size *= 2;
    down *= 2n;
  }
  return { up: BigInt(size), down };
}
