// Numbers as units.py writes them: the same text for the same number, held together by tests/data/units.json.
//
// A double is an exact fraction, and so is every unit here; the arithmetic is that of whole numbers, so no digit
// depends on how a browser rounds.

export const DASH = "–"; // a value that was not measured, or is no number

/** @typedef {{up: bigint, down: bigint}} Fraction both not negative, down not 0 */

/** @type {[bigint, bigint, string][]} from how many nanoseconds on, how many one has, its name */
const DURATIONS = [
  // Minutes and hours start at two, because "75.2 s" is easier to compare than "1.25 min".
  [7_200n * 10n ** 9n, 3_600n * 10n ** 9n, "h"],
  [120n * 10n ** 9n, 60n * 10n ** 9n, "min"],
  [10n ** 9n, 10n ** 9n, "s"],
  [10n ** 6n, 10n ** 6n, "ms"],
  [10n ** 3n, 10n ** 3n, "µs"],
  [0n, 1n, "ns"],
];
/** @type {[number, string][]} */
const TIME_UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
/** @type {[number, string][]} */
const LARGE_COUNTS = [[18, "E"], [15, "P"], [12, "T"]];

/**
 * A duration with its unit: "12.3 ms".
 * @param {number | null} ns
 */
export function formatDuration(ns) {
  if (ns === null || !Number.isFinite(ns)) return DASH;
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
  if (bytes === null || !Number.isFinite(bytes)) return DASH;
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
  if (value === null || !Number.isFinite(value)) return DASH;
  return sign(value) + count(fraction(value));
}

/**
 * A fraction of 1 as a percentage without decimals from 10% on: "40%", "4.2%".
 * @param {number | null} share
 */
export function formatRatio(share) {
  if (share === null || !Number.isFinite(share)) return DASH;
  const { up, down } = fraction(share);
  const isWhole = up * 10_000n >= 995n * down; // from 9.95% on
  return `${sign(share)}${measured({ up: up * 100n, down }, isWhole ? 0 : 1, 1)}%`;
}

/**
 * A rate, whose unit stands beside it: "4,939", "12.3".
 * @param {number | null} rate
 */
export function formatRate(rate) {
  if (rate === null || !Number.isFinite(rate)) return DASH;
  const { up, down } = fraction(rate);
  const exponent = exponentOf({ up, down });
  // The decimals of a large rate are noise.
  const isLarge = exponent >= 3 && exponent < 15;
  return sign(rate) + (isLarge ? withSeparators(rounded(up, down)) : measured({ up, down }, 2));
}

/**
 * When something began, with its unit: in so many digits that what began `apart` from it reads differently.
 * @param {number} ns since the begin of what is shown
 * @param {number} apart ns, such as a hundredth of its duration
 */
export function formatBegin(ns, apart) {
  const [scale, unit] = durationUnit(Math.abs(ns));
  const least = Math.max(1, Math.min(apart, Math.abs(ns) / 100)); // no less than three digits, no more than ns
  return `${placed(ns / scale, Math.log10(scale) - Math.floor(Math.log10(least) + 1e-9))} ${unit}`;
}

/**
 * The unit of an axis of durations: how many ns it has, and its name.
 * @param {number} ns what is to be at least one of it
 * @returns {[number, string]}
 */
export function durationUnit(ns) {
  return TIME_UNITS.find(([scale]) => ns >= scale) ?? TIME_UNITS[TIME_UNITS.length - 1];
}

/**
 * Labels of an axis of durations, in the unit of the largest.
 * @param {number[]} values in ns, ascending
 */
export function durationLabels(values) {
  const [scale, unit] = durationUnit(values[values.length - 1] ?? 0);
  return tickLabels(values, scale).map((text) => `${text} ${unit}`);
}

/**
 * Labels of an axis.
 * @param {number[]} values equally far from each other, ascending
 * @param {number} [scale] how many of the values' units one of the axis has
 */
export function tickLabels(values, scale = 1) {
  const step = values.length > 1 ? (values[1] - values[0]) / scale : 1;
  return values.map((value) => formatTick(value / scale, step));
}

/**
 * A label of an axis with as many decimals as its neighbours: 0, 0.5, 1.0.
 * @param {number} value a multiple of `step`
 * @param {number} step the distance of two labels: a power of ten, or 2, 2.5 or 5 of them
 */
export function formatTick(value, step) {
  const least = -Math.floor(Math.log10(step) + 1e-9); // the decimals of the step's first digit
  if (!(least >= -12 && least <= 6)) return formatCount(value);
  if (Math.abs(value) <= step / 2) return "0";
  const whole = step * 10 ** Math.max(least, 0);
  return placed(value, Math.max(least, 0) + (Math.abs(whole - Math.round(whole)) > 1e-6 ? 1 : 0)); // 2.5 has one more
}

/**
 * With so many decimals, and a comma after every three digits before them.
 * @param {number} value
 * @param {number} places
 */
function placed(value, places) {
  const [before, after] = fixed(fraction(value), Math.max(0, Math.round(places))).split(".");
  return `${sign(value)}${withSeparators(BigInt(before))}${after ? `.${after}` : ""}`;
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
