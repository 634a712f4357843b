// The stacked chart: bars of the layers, pale for steps that the benchmark excludes.

/** @typedef {import("./bins.js").Points} Points */
/** @typedef {import("./plot.js").Plot} Plot */

/**
 * @typedef {Object} Stack
 * @property {Points} points
 * @property {Float64Array} center each point's place on the x axis
 * @property {Float64Array[]} layers visible ones, lowest first
 * @property {string[]} colors of the layers
 * @property {string} page background color
 * @property {string} shade color of the shading
 */

const WIDE = 6; // pixels; wider bars have a gap between them
const GAP = 0.12;
const SHADE = 0.16;
const FADE = 0.5;

/**
 * Total heights of all visible layers.
 * @param {Points} points
 * @param {Float64Array[]} layers
 */
export function stackHeights(points, layers) {
  const heights = new Float64Array(points.count.length);
  for (const layer of layers) {
    for (let point = 0; point < heights.length; point += 1) heights[point] += layer[point];
  }
  return heights;
}

/**
 * Paint the stacks into a chart.
 * @param {Plot} plot
 * @param {Stack} stack
 */
export function paintStack({ chart }, { points, center, layers, colors, page, shade }) {
  const { ctx, bbox } = chart;
  const edges = edgesOf(chart, points, center);
  const [top, bottom] = [bbox.top, bbox.top + bbox.height];
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.fillStyle = shade;
  shadeLeftOut(ctx, points, edges, top, bottom, SHADE);
  const floor = new Float64Array(center.length);
  layers.forEach((layer, place) => {
    ctx.globalAlpha = 1;
    ctx.fillStyle = colors[place];
    for (let point = 0; point < floor.length; point += 1) {
      if (!(layer[point] > 0)) continue;
      const low = Math.round(chart.valToPos(floor[point], "y", true));
      floor[point] += layer[point];
      const high = Math.round(chart.valToPos(floor[point], "y", true));
      const [left, width] = bar(edges, point);
      ctx.fillRect(left, high, width, low - high);
    }
  });
  ctx.fillStyle = page;
  shadeLeftOut(ctx, points, edges, top, bottom, FADE);
  ctx.restore();
}

/**
 * Cover points by the share of their steps that was excluded.
 * @param {CanvasRenderingContext2D} ctx
 * @param {Points} points
 * @param {Float64Array} edges
 * @param {number} top
 * @param {number} bottom
 * @param {number} alpha if all were excluded
 */
function shadeLeftOut(ctx, { leftOut }, edges, top, bottom, alpha) {
  for (let point = 0; point < leftOut.length; point += 1) {
    if (!leftOut[point]) continue;
    // One excluded step among many must still be visible.
    ctx.globalAlpha = alpha * (0.4 + 0.6 * leftOut[point]);
    ctx.fillRect(edges[point], top, Math.max(1, edges[point + 1] - edges[point]), bottom - top);
  }
}

/**
 * Where points start, and where the last one ends, in canvas pixels.
 * @param {uPlot} chart
 * @param {Points} points
 * @param {Float64Array} center
 */
function edgesOf(chart, points, center) {
  const edges = new Float64Array(center.length + 1);
  for (let point = 0; point < center.length; point += 1) {
    const half = (points.end[point] - points.start[point]) / 2;
    edges[point] = Math.round(chart.valToPos(center[point] - half, "x", true));
    edges[point + 1] = Math.round(chart.valToPos(center[point] + half, "x", true));
  }
  return edges;
}

/**
 * Left edge and width of a bar.
 * @param {Float64Array} edges
 * @param {number} point
 * @returns {[number, number]}
 */
function bar(edges, point) {
  const place = edges[point + 1] - edges[point];
  const gap = place >= WIDE * devicePixelRatio ? Math.max(1, Math.round((GAP * place) / 2)) : 0;
  return [edges[point] + gap, Math.max(1, place - 2 * gap)];
}
