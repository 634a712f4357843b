// Light or dark, like TensorBoard; alone, like the system.

const DARK = "dark-mode"; // a class of TensorBoard's body

/** @returns {HTMLElement | null} */
function outerBody() {
  try {
    return window.parent === window ? null : window.parent.document.body;
  } catch {
    return null; // embedded in another site's page
  }
}

/** Follow the theme from now on; the event "themechange" tells drawings of changes. */
export function followTheme() {
  const body = outerBody();
  const follow = () => {
    document.documentElement.dataset.theme = body ? (body.classList.contains(DARK) ? "dark" : "light") : "auto";
    document.dispatchEvent(new CustomEvent("themechange"));
  };
  if (body) new MutationObserver(follow).observe(body, { attributeFilter: ["class"] });
  else matchMedia("(prefers-color-scheme: dark)").addEventListener("change", follow);
  follow();
}
