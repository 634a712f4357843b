// Numbers of ticks, tooltips and selections, with three significant digits. Python formats all other numbers.

export const DASH = "–"; // a missing value, or not a number

/** @type {[number, number, string][]} from how many ns on, ns per unit, name */
const DURATIONS = [
  [7.2e12, 3.6e12, "h"], [1.2e11, 6e10, "min"], [1e9, 1e9, "s"], [1e6, 1e6, "ms"], [1e3, 1e3, "µs"], [0, 1, "ns"],
];
/** @type {[number, string][]} */
const TIME_UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const MOST_DECIMALS = 20;

/** @typedef {number | null} Value */
/** @type {(value: Value, write: (value: number) => string) => string} */
const orDash = (value, write) => (value === null || !Number.isFinite(value) ? DASH : write(value));
/** @type {(value: number, decimals: number) => string} */
const fixed = (value, decimals) => {
  const places = Math.min(MOST_DECIMALS, Math.max(0, decimals));
  return value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
};
/** @type {(value: number) => string} */
const digits = (value) => (!value ? "0" : Math.abs(value) < 999.5 ? value.toPrecision(3) : fixed(value, 0));
/** @type {(value: number) => string} */
const percent = (value) => (Math.abs(value) >= 9.95 || !value ? fixed(value || 0, 0) : value.toPrecision(2));

export const formatCount = (/** @type {Value} */ value) =>
  orDash(value, (count) => (Number.isInteger(count) ? fixed(count || 0, 0) : digits(count)));
export const formatRate = (/** @type {Value} */ rate) => orDash(rate, digits);
export const formatRatio = (/** @type {Value} */ share) => orDash(share, (part) => `${percent(100 * part)}%`);
export const formatDuration = (/** @type {Value} */ ns) => orDash(ns, (time) => {
  const [, scale, unit] = DURATIONS.find(([from]) => Math.abs(time) >= 0.9995 * from) ?? DURATIONS[5];
  return `${digits(time / scale)} ${unit}`;
});
export const formatBytes = (/** @type {Value} */ bytes) => orDash(bytes, (size) => {
  const power = Math.min(BYTES.length - 1, Math.max(0, Math.floor(Math.log2(Math.abs(size)) / 10)));
  return `${power ? digits(size / 1024 ** power) : formatCount(size)} ${BYTES[power]}`;
});
/** @type {(ns: number) => [number, string]} ns per unit of an axis, and its name */
export const durationUnit = (ns) => TIME_UNITS.find(([scale]) => ns >= scale) ?? [1, "ns"];
/** @type {(ns: number, apart: number) => string} with enough digits to differ from a time `apart` away */
export const formatBegin = (ns, apart) => {
  const [scale, unit] = durationUnit(Math.abs(ns));
  const least = Math.max(1, Math.min(apart, Math.abs(ns) / 100)); // at least three digits, at most ns
  return `${fixed(ns / scale, Math.log10(scale) - Math.floor(Math.log10(least) + 1e-9))} ${unit}`;
};
/** @type {(value: number, step: number) => string} a multiple of a step of 1, 2, 2.5 or 5, with its decimals */
export const formatTick = (value, step) => {
  const least = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const isWhole = Number.isInteger(Number((step * 10 ** least).toPrecision(6))); // 2.5 has one more
  return Math.abs(value) <= step / 2 ? "0" : fixed(value, isWhole ? least : least + 1);
};
/** @type {(values: number[]) => string[]} labels of an axis, equally spaced, ascending */
export const tickLabels = (values) => values.map((value) => formatTick(value, values.length > 1 ? values[1] - values[0] : 1));
/** @type {(values: number[]) => string[]} the same for durations in ns, in the unit of the largest */
export const durationLabels = (values) => {
  const [scale, unit] = durationUnit(values[values.length - 1] ?? 0);
  return tickLabels(values.map((value) => value / scale)).map((text) => `${text} ${unit}`);
};
