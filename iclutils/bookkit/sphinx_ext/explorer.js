// Puts a drawing that answers to the hand in the place of each still picture.
for (const place of document.querySelectorAll(".explorer")) {
  const still = place.querySelector("img");
  const spec = JSON.parse(place.querySelector("script").textContent);
  const controls = document.createElement("form");
  const chart = document.createElement("div");
  place.append(controls, chart);
  controls.setAttribute("aria-label", "What the picture shows");
  controls.addEventListener("submit", (event) => event.preventDefault());
  const options = { mode: "vega-lite", renderer: "svg", actions: false, bind: controls };
  vegaEmbed(chart, { ...spec, description: still.alt }, options).then(
    () => {
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
    },
    (error) => {
      controls.remove();
      chart.remove();
      console.error(error);
    },
  );
}
