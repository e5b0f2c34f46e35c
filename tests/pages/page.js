// What the tests look for on a page: they call these functions in the browser.

// Nothing moves or fades any more, and what was folded is open.
async function settle() {
  const still = document.createElement("style");
  const none = "{ animation: none !important; transition: none !important }";
  still.textContent = `*, ::before, ::after ${none}`;
  document.head.append(still);
  for (const folded of document.querySelectorAll("details")) folded.open = true;
  for (const button of document.querySelectorAll(".toggle-button-hidden, .waits-bar button")) button.click();
  for (const image of document.images) image.loading = "eager"; // those of drawers, out of sight
  await Promise.allSettled([...document.images].map(image => image.decode()));
}

// All rules but contrast, and the one on the size of targets, which is off by default.
function structure() {
  const rules = { "color-contrast": { enabled: false }, "target-size": { enabled: true } };
  return axe.run(document, { resultTypes: ["violations"], rules });
}

// Contrast depends on the colours of a text and of what is behind it, on its size and weight. axe
// needs minutes for a long page, so one text of each kind is kept, and the others are emptied.
function thin() {
  const root = document.documentElement, kinds = new Map(), kept = new Set();
  const texts = [...document.body.querySelectorAll("*")].filter(element =>
    element.getClientRects().length &&
    [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  for (const theme of ["light", "dark"]) {
    root.dataset.theme = theme;
    const grounds = new Map([[null, ""]]);
    const ground = node => {
      if (!grounds.has(node)) {
        const { backgroundColor, backgroundImage, opacity } = getComputedStyle(node);
        const own = [backgroundColor, backgroundImage, opacity].join(" ");
        const plain = own === "rgba(0, 0, 0, 0) none 1";
        grounds.set(node, ground(node.parentElement) + (plain ? "" : own));
      }
      return grounds.get(node);
    };
    for (const text of texts) {
      const { color, fontSize, fontWeight } = getComputedStyle(text);
      const kind = [theme, color, fontSize, fontWeight, ground(text)].join();
      if (!kinds.has(kind)) kinds.set(kind, text);
    }
  }
  for (const first of [...kinds.values(), ...document.querySelectorAll("input, select")])
    for (let node = first; node; node = node.parentElement) kept.add(node);
  for (const text of texts)
    if (!kept.has(text)) text.tagName === "SPAN" ? text.remove() : text.replaceChildren();
  return kinds.size;
}

function contrast(theme) {
  document.documentElement.dataset.theme = theme;
  return axe.run(document, { resultTypes: ["violations"], runOnly: ["color-contrast"] });
}

// All rows of a table are made alike: for the quick look some of them are enough.
function shorten() {
  document.querySelectorAll("tr:nth-child(n + 20)").forEach(row => row.remove());
}

// What axe lets pass: an image with an empty text is decoration to it; here none is.
function nameless() {
  return [...document.images].filter(image => !image.alt.trim()).map(image => image.src);
}

function broken() {
  return [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src);
}

// What sticks out of the screen and out of no part that can be scrolled, so that nobody sees it.
function cutOff() {
  const scrolled = new Map([[null, false]]);
  const scrolls = node => {
    if (!scrolled.has(node)) {
      const own = ["auto", "scroll"].includes(getComputedStyle(node).overflowX) &&
        node.getBoundingClientRect().right <= innerWidth + 1;
      scrolled.set(node, own || scrolls(node.parentElement));
    }
    return scrolled.get(node);
  };
  return [...document.querySelectorAll("article :not(svg *)")].filter(e =>
    e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1 &&
    !scrolls(e)).map(e => e.outerHTML.slice(0, 120));
}
