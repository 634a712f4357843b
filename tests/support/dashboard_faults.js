// Finds layout faults of a view and returns them as sentences. WebDriver runs this as a function body.

const faults = [];
const seen = (e) => e.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true }) && e.getClientRects().length > 0;
const named = (e) => `${e.tagName.toLowerCase()}${e.id ? "#" + e.id : ""}${[...e.classList].map((c) => "." + c).join("")}`;
const page = document.documentElement;
if (page.scrollWidth > page.clientWidth + 1) faults.push(`the page is ${page.scrollWidth} px wide in ${page.clientWidth}`);
const main = document.querySelector("main");
const scrolls = (e) => /auto|scroll/.test(getComputedStyle(e).overflowX);
if (main.scrollWidth > main.clientWidth + 1) {
  let widest = null;
  const edge = main.getBoundingClientRect().right;
  for (const e of main.querySelectorAll("*")) {
    if (!seen(e) || e.getBoundingClientRect().right <= edge + 1) continue;
    let around = e.parentElement;
    while (around !== main && !scrolls(around) && getComputedStyle(around).overflowX === "visible") around = around.parentElement;
    if (around === main) widest = e;
  }
  faults.push(`main is ${main.scrollWidth} px wide in ${main.clientWidth}: ${widest && named(widest)}`);
}
const tells = (e) => e.closest("[title], summary") || e.querySelector("[title]") || e.closest("[data-about]");
for (const e of document.body.querySelectorAll("*")) {
  if (e.closest("svg, canvas, script, style, select, .tl-live") || !seen(e)) continue;
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
  const style = getComputedStyle(e);
  if (style.overflowX === "visible" || scrolls(e)) {
    // Text overflows a box that clips it.
    const range = document.createRange();
    range.selectNodeContents(e);
    const text = range.getBoundingClientRect();
    let box = e;
    while (box && box !== main && getComputedStyle(box).overflowX === "visible") box = box.parentElement;
    if (!box || box === main || box === document.body || scrolls(box) || tells(e)) continue;
    const edge = box.getBoundingClientRect();
    if (text.width > 0 && text.right > edge.right + 1.5 && text.left < edge.right) {
      faults.push(`cut: ${named(e)} in ${named(box)}: ${e.textContent.trim().slice(0, 50)}`);
    }
  } else if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 1 && !tells(e)) {
    faults.push(`cut: ${named(e)}: ${e.textContent.trim().slice(0, 50)}`);
  }
}
for (const svg of main.querySelectorAll("svg")) {
  if (!seen(svg)) continue;
  const edge = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].filter((t) => seen(t) && t.textContent.trim());
  const boxes = texts.map((t) => t.getBoundingClientRect());
  boxes.forEach((box, place) => {
    const words = texts[place].textContent.slice(0, 30);
    if (box.right > edge.right + 1.5 || box.left < edge.left - 1.5) faults.push(`out of its drawing: ${words}`);
    if (box.height < 7) faults.push(`too small to read (${box.height.toFixed(1)} px): ${words}`);
    for (let other = 0; other < place; other += 1) {
      const b = boxes[other];
      const across = Math.min(box.right, b.right) - Math.max(box.left, b.left);
      const down = Math.min(box.bottom, b.bottom) - Math.max(box.top, b.top);
      if (across > 2 && down > 3) faults.push(`on each other: ${words} and ${texts[other].textContent.slice(0, 30)}`);
    }
  });
}
for (const axis of main.querySelectorAll(".xs, .ys")) {
  const labels = [...axis.children].filter(seen);
  const boxes = labels.map((l) => l.getBoundingClientRect());
  boxes.forEach((box, place) => {
    const b = boxes[place - 1];
    if (b && Math.min(box.right, b.right) - Math.max(box.left, b.left) > 1
      && Math.min(box.bottom, b.bottom) - Math.max(box.top, b.top) > 2) faults.push(`ticks on each other: ${labels[place].textContent}`);
  });
}
return [...new Set(faults)].slice(0, 12);
