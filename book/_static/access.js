/* Keyboard and paper, where the theme leaves something out. Without scripts nothing is lost. */

/* Formulas that are wider than the page can be reached, and so scrolled, with the keyboard. */
function reachFormulas() {
  for (const formula of document.querySelectorAll("div.math")) {
    if (formula.scrollWidth > formula.clientWidth) formula.tabIndex = 0;
    else formula.removeAttribute("tabindex");
  }
}
window.addEventListener("resize", reachFormulas);
window.addEventListener("load", reachFormulas);

/* Paper is light, whatever the screen is. */
let shown;
window.addEventListener("beforeprint", () => {
  shown = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
});
window.addEventListener("afterprint", () => {
  document.documentElement.dataset.theme = shown;
});
