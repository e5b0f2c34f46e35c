/* Keyboard and paper, where the theme leaves something out. Without scripts nothing is lost. */

/* Formulas and figures wider than the page can be reached, and so scrolled, with the keyboard. */
function reachWide() {
  for (const wide of document.querySelectorAll("div.math, figure, .cell_output")) {
    if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
    else wide.removeAttribute("tabindex");
  }
}
window.addEventListener("resize", reachWide);
window.addEventListener("load", reachWide);

/* What a cell prints is wrapped, unless blanks make columns of it. */
window.addEventListener("DOMContentLoaded", () => {
  for (const printed of document.querySelectorAll(".cell_output pre"))
    printed.classList.toggle("wraps", !/\S {2,}\S/.test(printed.textContent));
});

/* Paper shows no code but lessons: what introduces a cell that shows nothing else is left out. */
window.addEventListener("DOMContentLoaded", () => {
  for (const words of document.querySelectorAll("article p")) {
    if (!words.textContent.trim().endsWith(":")) continue;
    const next = words.nextElementSibling;
    const shown = next?.matches(".cell.tag_lesson, .cell:has(.cell_output), :not(.cell, p, section)");
    words.classList.toggle("over-nothing", !shown && words.parentElement.matches("section"));
  }
});

/* What a chapter knows would answer its bets: it waits until all above it are answered, or for a press.
   So does what would answer the last one. */
const OPEN = ".answer.toggle-hidden, .bet + .cell.tag_hide-cell > details:not([open]), " +
  ".live-bet:not(:has([aria-pressed=true], :disabled))";
window.addEventListener("load", () => {
  for (const box of document.querySelectorAll(".after-bets")) {
    const above = (kind) => [...document.querySelectorAll(kind)]
      .filter((bet) => bet.compareDocumentPosition(box) & Node.DOCUMENT_POSITION_FOLLOWING);
    const one = box.matches(".of-last"); // it waits for the last answer alone
    const bets = () => (one ? above(".admonition.answer").slice(-1).filter((bet) => bet.matches(OPEN)) : above(OPEN));
    if (!bets().length) continue;
    const bar = document.createElement("button");
    const show = () => { bar.remove(); box.classList.remove("waits"); };
    bar.type = "button";
    bar.className = "waits-bar";
    bar.textContent = `This opens with the ${one ? "answer" : "answers to all bets above, and to that of the live figure"}${one ? " above" : ""}, or at once with a press here.`;
    bar.addEventListener("click", () => { show(); box.tabIndex = -1; box.focus(); });
    document.addEventListener("click", () => bets().length || show());
    document.addEventListener("toggle", () => bets().length || show(), true); // it does not bubble
    box.before(bar);
    box.classList.add("waits");
  }
});

/* A link to something in a closed part of the page opens it. */
function openTarget() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  const closed = [...document.querySelectorAll("details:not([open])")].filter((details) =>
    details.contains(target) || (details.parentElement === target && details.matches(".drawer")));
  for (const details of closed) details.open = true;
  const folded = target.closest(".admonition.toggle-hidden")?.querySelector("button.toggle-button");
  folded?.click();
  target.closest(".waits")?.previousElementSibling.click();
  if (closed.length || folded) target.scrollIntoView();
}
window.addEventListener("hashchange", openTarget);
window.addEventListener("load", openTarget);

/* Paper is light, whatever the screen is. */
let shown;
window.addEventListener("beforeprint", () => {
  shown = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
});
window.addEventListener("afterprint", () => {
  document.documentElement.dataset.theme = shown;
});
