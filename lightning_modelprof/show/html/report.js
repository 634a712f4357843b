"use strict";
// What the page does when it is used: sort, search, fold, look at a point of a chart, choose a theme.
// Nothing is computed or rounded here; every text was written by the report.

// Theme: as the system says, or as chosen.
const themes = ["auto", "light", "dark"];
const themeButton = document.getElementById("theme");

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  themeButton.textContent = `Theme: ${name}`;
}

function storedTheme() {
  try {
    const name = localStorage.getItem("modelprof-theme");
    return themes.includes(name) ? name : "auto";
  } catch {
    return "auto"; // a browser may keep nothing for files
  }
}

themeButton.addEventListener("click", () => {
  const name = themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length];
  setTheme(name);
  try {
    localStorage.setItem("modelprof-theme", name);
  } catch {
    // then it holds for this visit
  }
});
setTheme(storedTheme());

// Tables. A row is shown when its ancestors are open and it is among the first of its siblings, or, while
// there is a search, when it or a row below it has every word.
class SortableTable {
  constructor(table) {
    this.body = table.tBodies[0];
    this.limit = Number(table.dataset.limit);
    this.words = [];
    this.roots = [];
    const above = [];
    this.rows = Array.from(this.body.rows, (element, index) => {
      const depth = Number(element.dataset.depth || 0);
      const twist = element.querySelector(".twist");
      const isOpen = twist === null || twist.getAttribute("aria-expanded") === "true";
      const row = { element, index, twist, isOpen, below: [], text: null };
      above.length = Math.min(above.length, depth);
      (above.length ? above[above.length - 1].below : this.roots).push(row);
      while (above.length < depth) above.push(row); // a level that is left out
      above.push(row);
      return row;
    });
    for (const row of this.rows.filter((row) => row.twist)) {
      row.twist.addEventListener("click", () => {
        row.isOpen = !row.isOpen;
        this.show();
      });
    }
    const headers = Array.from(table.tHead.rows[table.tHead.rows.length - 1].cells);
    headers.forEach((header, column) => {
      header.querySelector("button")?.addEventListener("click", () => this.sort(headers, header, column));
    });
    this.connect(table.closest("section").querySelector(".tools"));
  }

  connect(tools) {
    this.count = tools?.querySelector("output");
    const search = tools?.querySelector("input");
    search?.addEventListener("input", () => {
      this.words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      this.show();
    });
    const openAll = (isOpen) => {
      for (const row of this.rows) row.isOpen = isOpen;
    };
    const actions = {
      open: () => openAll(true),
      close: () => openAll(false),
      all: (button) => {
        this.limit = Infinity;
        button.remove();
      },
    };
    for (const button of tools?.querySelectorAll("button") ?? []) {
      button.addEventListener("click", () => {
        actions[button.dataset.do](button);
        this.show();
      });
    }
    if (this.count) this.show();
  }

  matches(row) {
    if (row.text === null) {
      const names = Array.from(row.element.querySelectorAll("[title]"), (name) => name.title);
      const texts = Array.from(row.element.querySelectorAll("th, td:not(.n)"), (cell) => cell.textContent);
      row.text = [...texts, ...names].join(" ").toLowerCase(); // names, not numbers
    }
    return this.words.every((word) => row.text.includes(word));
  }

  show() {
    const isSearch = this.words.length > 0;
    let found = 0;
    const visit = (siblings, isVisible) => {
      let anyFound = false;
      siblings.forEach((row, rank) => {
        const isFound = isSearch && this.matches(row);
        const isShown = !isSearch && isVisible && rank < this.limit;
        const isAnyBelow = visit(row.below, isShown && row.isOpen);
        const isListed = isSearch ? isFound || isAnyBelow : isShown;
        if (isSearch ? isFound : isShown) found += 1;
        if (row.element.hidden === isListed) row.element.hidden = !isListed;
        row.element.classList.toggle("filtered", isSearch && !isListed);
        row.twist?.setAttribute("aria-expanded", String(isSearch ? isAnyBelow : row.isOpen));
        anyFound ||= isFound || isAnyBelow;
      });
      return anyFound;
    };
    visit(this.roots, true);
    if (this.count) {
      const total = this.rows.length.toLocaleString("en");
      this.count.textContent = `${found.toLocaleString("en")} of ${total} rows`;
    }
  }

  // First the largest (of names the first), then the other way round, then as it came. What was not
  // measured stays last. In a tree the rows below one row are sorted among themselves.
  sort(headers, header, column) {
    const isNumber = header.classList.contains("n");
    const cycle = isNumber ? ["descending", "ascending"] : ["ascending", "descending"];
    const order = cycle[cycle.indexOf(header.getAttribute("aria-sort")) + 1];
    for (const other of headers) other.removeAttribute("aria-sort");
    if (order) header.setAttribute("aria-sort", order);
    const sign = order === "descending" ? -1 : 1;
    const key = (row) => {
      const cell = row.element.cells[column];
      const isMissing = cell.classList.contains("none") || (isNumber && !("v" in cell.dataset));
      return isMissing ? null : isNumber ? Number(cell.dataset.v) : cell.textContent;
    };
    const compare = (a, b) => {
      if (!order || a.key === b.key) return a.row.index - b.row.index;
      if (a.key === null || b.key === null) return a.key === null ? 1 : -1;
      return sign * (isNumber ? a.key - b.key : a.key.localeCompare(b.key, "en", { numeric: true }));
    };
    const sorted = document.createDocumentFragment();
    const arrange = (siblings) => {
      const keyed = siblings.map((row) => ({ row, key: key(row) })).sort(compare);
      keyed.forEach(({ row }, place) => {
        siblings[place] = row;
      });
      for (const row of siblings) {
        sorted.append(row.element);
        arrange(row.below);
      }
    };
    arrange(this.roots);
    this.body.append(sorted);
    this.show();
  }
}

document.querySelectorAll("section.table table").forEach((table) => new SortableTable(table));

// Charts: the values of the point under the pointer, or chosen with the arrow keys, stand in the legend.
function connectChart(figure) {
  const field = figure.querySelector(".field");
  if (!field) return;
  const cursor = field.querySelector(".cursor");
  const { points, values, totals } = JSON.parse(figure.querySelector("script").textContent);
  const legend = Array.from(figure.querySelectorAll(".legend li:not(.point):not(.total) b")).reverse();
  const point = figure.querySelector(".point");
  const total = figure.querySelector(".total b");
  let place = null;

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
  const within = (index) => Math.max(0, Math.min(points.length - 1, index));
  field.addEventListener("pointermove", (event) => {
    const box = field.getBoundingClientRect();
    look(within(Math.floor((points.length * (event.clientX - box.left)) / box.width)));
  });
  field.addEventListener("pointerleave", () => look(null));
  field.addEventListener("blur", () => look(null));
  field.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    look(within((place ?? (moves[event.key] > 0 ? -1 : points.length)) + moves[event.key]));
  });
}
document.querySelectorAll("figure.chart").forEach(connectChart);

// A link into a folded table opens it; paper shows everything.
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const details = target?.querySelector(":scope > details");
  if (details) details.open = true;
}
addEventListener("hashchange", openTarget);
openTarget();

let closed = [];
addEventListener("beforeprint", () => {
  closed = Array.from(document.querySelectorAll("main details:not([open])"));
  for (const details of closed) details.open = true;
});
addEventListener("afterprint", () => {
  for (const details of closed) details.open = false;
});

const contents = document.querySelector("nav details");
if (matchMedia("(max-width: 75rem)").matches) contents.open = false;
