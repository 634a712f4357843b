// Opens a trace on Perfetto's page in a new tab, in the way that page documents. The trace goes from tab to tab in
// this browser; nothing is requested from that host unless a reader presses the button.

const ORIGIN = "https://ui.perfetto.dev";
const EVERY_MS = 100;
const PATIENCE_MS = 30_000;

/**
 * @param {() => Promise<Blob>} load fetches the trace; called once the tab is open
 * @param {string} title
 * @param {(message: string) => void} say
 * @param {number} patienceMs how long the other tab has to answer
 * @returns {() => void} stops waiting
 */
export function openInPerfetto(load, title, say, patienceMs = PATIENCE_MS) {
  const opened = window.open(ORIGIN);
  if (!opened) {
    say("The browser blocked the new tab. Allow pop-ups for this page, or download the trace.");
    return () => {};
  }
  const tab = opened;
  say("Waiting for Perfetto…");
  const loaded = load();
  let isOver = false;
  const asking = setInterval(() => tab.postMessage("PING", ORIGIN), EVERY_MS);
  const patience = setTimeout(() => {
    stop();
    say(`${ORIGIN} didn't answer. Download the trace and open it there.`);
  }, patienceMs);

  function stop() {
    isOver = true;
    clearInterval(asking);
    clearTimeout(patience);
    removeEventListener("message", hear);
  }

  /** @param {MessageEvent} event */
  async function hear(event) {
    if (event.source !== tab || event.origin !== ORIGIN || event.data !== "PONG" || isOver) return;
    stop();
    try {
      const buffer = await (await loaded).arrayBuffer();
      tab.postMessage({ perfetto: { buffer, title } }, ORIGIN, [buffer]);
      say("Trace opened in Perfetto.");
    } catch (error) {
      say(`Can't load the trace: ${error instanceof Error ? error.message : error}`);
    }
  }

  addEventListener("message", hear);
  loaded.catch((error) => {
    if (isOver) return;
    stop();
    say(`Can't load the trace: ${error.message}`);
  });
  return stop;
}

/**
 * Save a file as if it had been downloaded.
 * @param {Blob} blob
 * @param {string} name
 */
export function saveFile(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // the browser may still be asking where to save it
}
