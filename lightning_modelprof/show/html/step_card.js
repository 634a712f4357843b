// The step card as an image: into the clipboard or, if the browser doesn't allow that, into a file.

const PIXELS = 2; // per unit of the drawing, so that it's sharp when enlarged

/**
 * Make the button of a card work.
 * @param {HTMLElement} figure
 */
export function connectStepCard(figure) {
  const svg = figure.querySelector("svg");
  const said = figure.querySelector("output");
  figure.querySelector("[data-do=image]")?.addEventListener("click", async () => {
    if (!svg || !said) return;
    try {
      const image = await drawCard(svg);
      said.textContent = (await copyImage(image)) ? "Copied" : saveImage(image);
    } catch {
      said.textContent = "The browser doesn't allow drawing an image";
    }
  });
}

/**
 * Draw the card in its current colors.
 * @param {SVGSVGElement} svg
 * @returns {Promise<Blob>}
 */
async function drawCard(svg) {
  const { width, height } = svg.viewBox.baseVal;
  const copy = /** @type {SVGSVGElement} */ (svg.cloneNode(true));
  const space = svg.namespaceURI ?? "";
  const back = document.createElementNS(space, "rect");
  const page = getComputedStyle(document.body).backgroundColor;
  const isClear = page === "transparent" || page.endsWith(", 0)");
  for (const [name, value] of Object.entries({ width, height, fill: isClear ? "#fff" : page })) {
    back.setAttribute(name, String(value));
  }
  copy.prepend(back);
  copy.setAttribute("xmlns", space);
  copy.setAttribute("color", getComputedStyle(svg).color);
  copy.setAttribute("width", String(width * PIXELS));
  copy.setAttribute("height", String(height * PIXELS));
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  await picture.decode();
  const canvas = document.createElement("canvas");
  canvas.width = width * PIXELS;
  canvas.height = height * PIXELS;
  canvas.getContext("2d")?.drawImage(picture, 0, 0);
  return new Promise((resolve, reject) => {
    canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("no image"))), "image/png");
  });
}

/**
 * @param {Blob} image
 * @returns {Promise<boolean>} whether it's in the clipboard
 */
async function copyImage(image) {
  try {
    await navigator.clipboard.write([new ClipboardItem({ [image.type]: image })]);
    return true;
  } catch {
    return false;
  }
}

/** @param {Blob} image */
function saveImage(image) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(image);
  link.download = "step.png";
  link.click();
  URL.revokeObjectURL(link.href);
  return "Saved as step.png";
}
