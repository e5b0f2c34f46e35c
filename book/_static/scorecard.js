// The filter of the scorecard: hides rows, says how many are left, and keeps what was chosen in the
// page's address. A row belongs to a choice if it has the class on-FIELD-VALUE.
(() => {
  const form = document.querySelector("form.scorecard-filter");
  if (!form) return;
  const shown = form.querySelector("output");
  const tables = [...document.querySelectorAll("table.scorecard")];
  const rows = tables.flatMap(table => [...table.tBodies[0].rows]);
  const texts = new Map(rows.map(row => [row, row.textContent.toLowerCase()]));

  function chosen() {
    const fields = new URLSearchParams(new FormData(form));
    for (const [field, value] of [...fields]) if (!value.trim()) fields.delete(field);
    return fields;
  }

  function show() {
    const fields = chosen();
    const words = (fields.get("words") || "").toLowerCase().split(/\s+/);
    const kinds = [...fields].filter(([field]) => field !== "words")
      .map(([field, value]) => `on-${field}-${value.replaceAll(" ", "-")}`);
    for (const row of rows) {
      row.hidden = !(kinds.every(kind => row.classList.contains(kind)) &&
        words.every(word => texts.get(row).includes(word)));
    }
    for (const table of tables) {
      table.closest("section").hidden = [...table.tBodies[0].rows].every(row => row.hidden);
      if (fields.size) table.closest("details").open = true;
    }
    shown.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length} claims`;
    const query = fields.size ? `?${fields}` : location.pathname;
    try { history.replaceState(null, "", query + location.hash); } catch { /* only the address */ }
  }

  // A link to a row shows that row, whatever was chosen before.
  function follow() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const fold = target?.closest("details:not([open])");
    if (fold) fold.open = true;
    if (target?.closest("[hidden]")) {
      form.reset();
      show();
    } else if (!fold) return;
    target.scrollIntoView();
  }

  for (const [field, value] of new URLSearchParams(location.search)) {
    if (form.elements[field]) form.elements[field].value = value;
  }
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("input", show);
  form.addEventListener("reset", () => setTimeout(show)); // the fields are emptied after this
  addEventListener("hashchange", follow);
  form.hidden = false;
  if (chosen().size) form.scrollIntoView();
  show();
  follow();
})();
