// Charts: the values of the point under the pointer, or chosen with the arrow keys, stand in the legend.

/**
 * @param {HTMLElement} figure
 */
export function connectChart(figure) {
  /** @type {HTMLElement | null} */
  const field = figure.querySelector(".field");
  if (!field) return; // one bar, which says all in its legend
  const cursor = /** @type {HTMLElement} */ (field.querySelector(".cursor"));
  /** @type {{points: string[], values: string[][], totals: string[]}} */
  const { points, values, totals } = JSON.parse(figure.querySelector("script")?.textContent ?? "");
  const legend = Array.from(figure.querySelectorAll(".legend li:not(.point):not(.total) b"));
  if (!figure.querySelector("path.line")) legend.reverse(); // the uppermost of a stack stands first
  const point = /** @type {HTMLElement} */ (figure.querySelector(".point"));
  const total = figure.querySelector(".total b");
  /** @type {number | null} */
  let place = null;

  /** @param {number | null} index */
  const look = (index) => {
    place = index;
    cursor.hidden = index === null;
    point.textContent = index === null ? "" : points[index];
    legend.forEach((entry, layer) => {
      entry.textContent = index === null ? "" : values[layer][index];
    });
    if (total) total.textContent = index === null ? "" : totals[index];
    if (index !== null) {
      cursor.style.left = `${(100 * index) / points.length}%`;
      cursor.style.width = `${100 / points.length}%`;
    }
  };
  /** @param {number} index */
  const within = (index) => Math.max(0, Math.min(points.length - 1, index));
  field.addEventListener("pointermove", (event) => {
    const box = field.getBoundingClientRect();
    look(within(Math.floor((points.length * (event.clientX - box.left)) / box.width)));
  });
  field.addEventListener("pointerleave", () => look(null));
  field.addEventListener("blur", () => look(null));
  field.addEventListener("keydown", (event) => {
    /** @type {Record<string, number>} */
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    look(within((place ?? (moves[event.key] > 0 ? -1 : points.length)) + moves[event.key]));
  });
}
