// Distribution of a range's clean step times, drawn like the charts from Python.

import { durationLabels, formatBegin, formatCount, formatDuration, tickLabels } from "../format.js";
import { followPoints } from "../html/chart.js";
import { make } from "../dom.js";
import { niceStep } from "../nice_step.js";
import { histogram } from "./statistics.js";

/** @type {(figures: import("./statistics.js").Figures, words: import("./readout.js").Words) => HTMLElement} */
export function histogramChart({ sorted, p50, p90, p99 }, { step, steps }) {
  const bars = histogram(sorted);
  const note = make("p", { class: "note" }, bars ? `Clean ${steps} in the range.` : `No clean ${step} in this range.`);
  const figure = make("figure", { class: "chart steps-chart" }, make("h2", {}, `Clean ${step} times`), note);
  if (!bars) return figure;
  const { low, width, counts, beyond } = bars;
  if (beyond) note.append(` ${formatCount(beyond)} slower ${beyond === 1 ? step : steps} past the right edge.`);
  const [length, top] = [counts.length, 1.25 * Math.max(...counts)]; // the percentiles are above the bars
  const x = (/** @type {number} */ time) => (100 * (time - low)) / (width * length);
  const y = (/** @type {number} */ count) => (100 * count) / top;
  const [times, heights] = [ticks(low, low + width * length, 6), ticks(0, top, 5)];
  const [timeTexts, heightTexts] = [durationLabels(times), tickLabels(heights)];
  const marks = Object.entries({ p50, p90, p99 }).map(([name, time], place) => {
    const at = x(time ?? 0);
    const side = at > 70 ? "right" : "left";
    const text = `<span style="${side}: 0; top: ${1.2 * place}em">${name} ${formatDuration(time)}</span>`;
    return `<div class="steps-mark" style="left: ${at}%">${text}</div>`;
  });
  const plot = make("div", { class: "plot" });
  // Only numbers, so nothing needs escaping.
  plot.innerHTML = `
    <div class="ys" aria-hidden="true">${heightTexts.map((text, n) => `<span style="bottom: ${y(heights[n])}%">${text}</span>`).join("")}</div>
    <div class="field" tabindex="0" role="img" aria-label="Histogram. Arrow keys show the values of each bar below.">
      ${heights.map((height) => `<hr style="bottom: ${y(height)}%">`).join("")}
      <svg viewBox="0 0 ${length} ${top}" preserveAspectRatio="none">
        <path class="c1" d="${counts.map((count, n) => `M${n + 0.06} ${top}v${-count}h.88v${count}`).join("")}"/>
      </svg>
      ${marks.join("")}<div class="cursor" hidden></div>
    </div>
    <div class="xs" aria-hidden="true">${timeTexts.map((text, n) => `<span style="left: ${x(times[n])}%">${text}</span>`).join("")}</div>`;
  const points = counts.map((count, bar) => {
    const edges = [bar, bar + 1].map((edge) => formatBegin(low + edge * width, width));
    return `${edges.join(" to ")}: ${formatCount(count)} ${count === 1 ? step : steps}`;
  });
  const point = make("li", { class: "point", "aria-live": "polite" });
  figure.append(plot, make("ul", { class: "legend" }, point));
  const [field, cursor] = [".field", ".cursor"].map((name) => /** @type {HTMLElement} */ (plot.querySelector(name)));
  followPoints(field, cursor, points.length, (bar) => {
    point.textContent = bar === null ? "" : points[bar];
  });
  return figure;
}

/** @type {(low: number, high: number, most: number) => number[]} round numbers from low to high */
function ticks(low, high, most) {
  const step = niceStep((high - low) / most);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, place) => (first + place) * step);
}
