/* Keyboard and paper, where the theme leaves something out. Without scripts nothing is lost. */

/* What is wider than the page can be reached, and so scrolled, with the keyboard, and says that it
   goes on; a few pixels are no more than a rounding. It is measured anew when it changes its size, or
   is unfolded. */
window.addEventListener("load", async () => {
  await document.fonts.ready; // with other letters it would be wider
  const sizes = new ResizeObserver((changes) => {
    for (const { target } of changes) {
      const over = target.scrollWidth - target.clientWidth;
      if (over > 0) target.tabIndex = 0;
      else target.removeAttribute("tabindex");
      target.classList.toggle("wide", over > 4);
    }
  });
  for (const part of document.querySelectorAll("div.math, figure, .cell_output, .cell_output pre")) sizes.observe(part);
});

/* On a phone a figure is shown whole. Where its type is then small, a button makes it larger. */
window.addEventListener("DOMContentLoaded", () => {
  for (const plot of document.querySelectorAll("article .cell_output svg.plot")) {
    if (plot.getAttribute("width") < 480) continue; // pixels: its type is large enough
    const box = plot.closest("figure, .cell_output"), button = document.createElement("button");
    const show = (large) => {
      box.classList.toggle("larger", large);
      button.textContent = large ? "Show the whole figure" : "Show this figure larger";
    };
    button.type = "button";
    button.className = "larger-button";
    button.addEventListener("click", () => show(!box.matches(".larger")));
    show(false);
    plot.after(button);
  }
});

/* What a cell prints is wrapped, unless blanks make columns of it: then a phone fits its type to them. */
window.addEventListener("DOMContentLoaded", () => {
  for (const printed of document.querySelectorAll(".cell_output pre")) {
    printed.classList.toggle("wraps", !/\S {2,}\S/.test(printed.textContent));
    printed.style.setProperty("--columns", Math.max(...printed.textContent.split("\n").map((line) => line.length)));
  }
  // code is wrapped on a phone: what a line has left stands further in than the line begins
  for (const code of document.querySelectorAll("article :not(.output) > .highlight pre")) {
    code.innerHTML = code.innerHTML.trimEnd().split("\n").map((line) => `<span class="line">${line}\n</span>`).join("");
    for (const line of code.children) line.style.setProperty("--in", Math.max(0, line.textContent.search(/\S/)));
  }
});

/* A drawer opens as a list of its sections, each closed. */
window.addEventListener("DOMContentLoaded", () => {
  for (const part of document.querySelectorAll("details.drawer > section")) {
    const fold = document.createElement("details"), head = document.createElement("summary");
    fold.className = "printed";
    const nodes = [...part.childNodes];
    head.append(...nodes.slice(0, nodes.indexOf(part.querySelector("h3")) + 1)); // with the targets of links before it
    fold.append(head, ...part.childNodes);
    part.append(fold);
  }
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

/* A bet of the text is pressed, as one of a live figure: "(a) one; (b) two." are buttons, and a press
   opens the answer, which begins with the letter of the right choice. */
window.addEventListener("load", () => {
  for (const bet of document.querySelectorAll(".admonition.bet")) {
    const said = [...bet.querySelectorAll(":scope > p")].filter((words) => /^\s*\([a-h]\)\s/.test(words.textContent));
    let answer = bet.nextElementSibling;
    while (answer && !answer.matches(".answer, .bet, section")) answer = answer.nextElementSibling;
    if (!answer?.matches(".answer")) continue;
    answer.classList.add("of-bet");
    if (!said.length) continue;
    const right = /\(([a-h])\)/.exec(answer.querySelector("p:not(.admonition-title)")?.textContent)?.[1];
    const box = document.createElement("div");
    const buttons = said.map((words) => words.innerHTML).join(" ").split(/(?=\([a-h]\)\s)/).filter((text) => text.trim()).map((text) => {
      const button = document.createElement("button");
      button.type = "button";
      button.innerHTML = text.trim().replace(/[;.]$/, "");
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => {
        button.setAttribute("aria-pressed", "true");
        for (const each of buttons) {
          const letter = each.textContent[1];
          each.disabled = true;
          each.classList.toggle("live-right", letter === right);
          each.classList.toggle("live-wrong", each === button && letter !== right);
        }
        answer.querySelector(".toggle-button-hidden")?.click();
      });
      return button;
    });
    box.className = "bet-choices";
    box.append(...buttons);
    for (const words of said) words.classList.add("bet-said");
    said.at(-1).after(box);
  }
});

/* What a chapter knows would answer its bets: it waits until all above it are answered, or for a press.
   So does what would answer the last one. A bar says which bets are left. */
const OPEN = ".of-bet.toggle-hidden, .live-bet:not(:has([aria-pressed=true], :disabled)), .live-by-deed:not(:has(:disabled))";
const follows = (one, other) => one.compareDocumentPosition(other) & Node.DOCUMENT_POSITION_FOLLOWING;
function betOf(open) { // a bet of the text stands above its answer
  const live = open.matches(".live-bet");
  const bet = live ? open : [...document.querySelectorAll(".bet")].filter((one) => follows(one, open)).at(-1) ?? open;
  const title = bet.closest("section").querySelector("h1, h2, h3"), heading = [...title.childNodes];
  if (live && title.matches("h1")) return [bet, "the live figure’s"];
  return [bet, `the one in “${heading.filter((part) => !part.matches?.(".headerlink")).map((part) => part.textContent).join("").trim()}”`];
}
window.addEventListener("load", () => {
  for (const box of document.querySelectorAll(".after-bets")) {
    const above = (kind) => [...document.querySelectorAll(kind)].filter((bet) => follows(bet, box));
    const last = box.matches(".of-last"); // it waits for the last answer alone
    const bets = () => (last ? above(".admonition.answer").slice(-1).filter((bet) => bet.matches(OPEN)) : above(OPEN));
    if (!bets().length) continue;
    const bar = document.createElement("p"), left = document.createElement("span"), button = document.createElement("button");
    const watch = new MutationObserver(tell);
    const show = () => { watch.disconnect(); bar.remove(); box.classList.remove("waits"); };
    function tell() {
      const open = bets();
      if (!open.length) return show();
      if (left.children.length === open.length) return;
      const links = open.map((one, i) => {
        const link = document.createElement("a"), [bet, name] = betOf(one);
        bet.id ||= `bet-${above(OPEN).indexOf(one) + 1}`;
        link.href = `#${bet.id}`;
        link.textContent = last ? "the bet above" : name;
        return i ? [i + 1 < open.length ? ", " : " and ", link] : [link];
      });
      const says = last ? "This opens with the answer to " : `This opens when you have answered all bets above. ${open.length} ${open.length > 1 ? "are" : "is"} left: `;
      left.replaceChildren(says, ...links.flat(), ". ");
    }
    bar.className = "waits-bar";
    button.type = "button";
    button.textContent = "Open it all the same";
    button.addEventListener("click", () => { show(); box.tabIndex = -1; box.focus(); });
    bar.append(left, button);
    tell();
    watch.observe(document.querySelector("article"), { attributeFilter: ["class", "open", "aria-pressed", "disabled"], subtree: true });
    box.before(bar);
    box.classList.add("waits");
  }
});

/* A link to something in a closed part of the page opens it. */
function openTarget() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  const closed = [...document.querySelectorAll("details:not([open])")].filter((details) =>
    details.contains(target) || (details.parentElement === target && details.matches(".drawer, .drawer *")));
  for (const details of closed) details.open = true;
  const folded = target.closest(".admonition.toggle-hidden")?.querySelector("button.toggle-button");
  folded?.click();
  target.closest(".waits")?.previousElementSibling.querySelector("button").click();
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
