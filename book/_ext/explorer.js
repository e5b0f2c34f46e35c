// Puts a drawing that answers to the hand in the place of a still picture, when asked to.
const own = document.currentScript;
let library; // loaded once, for the first who asks
const load = () =>
  (library ??= new Promise((done, fail) => {
    const script = document.createElement("script");
    Object.assign(script, { src: new URL(own.dataset.library, own.src), onload: done, onerror: fail });
    document.head.append(script);
  }));

for (const place of document.querySelectorAll(".explorer")) {
  const still = place.querySelector("img");
  const spec = JSON.parse(place.querySelector("script").textContent);
  const button = document.createElement("button");
  button.type = "button";
  button.className = "explore";
  button.textContent = "Explore this figure";
  place.append(button);
  button.addEventListener("click", async () => {
    button.disabled = true;
    const controls = document.createElement("form");
    const chart = document.createElement("div");
    place.append(controls, chart);
    controls.setAttribute("aria-label", "What the picture shows");
    controls.addEventListener("submit", (event) => event.preventDefault());
    const options = { mode: "vega-lite", renderer: "svg", actions: false, bind: controls };
    try {
      await load();
      await vegaEmbed(chart, { ...spec, description: still.alt }, options);
      const drawing = chart.querySelector("svg");
      const natural = drawing.viewBox.baseVal.width;
      drawing.style.cssText = `min-width: ${0.9 * natural}px; max-width: ${1.4 * natural}px`;
      chart.className = "explorer-chart";
      chart.tabIndex = 0; // a narrow page scrolls it, also by keyboard
      for (const few of controls.querySelectorAll(".vega-bind-radio")) {
        few.setAttribute("role", "radiogroup");
        few.setAttribute("aria-label", few.parentNode.firstChild.textContent);
      }
      still.hidden = true;
      button.remove();
      controls.querySelector("input, select")?.focus();
    } catch (error) {
      controls.remove();
      chart.remove();
      console.error(error);
    }
  });
}
