// A field above the scorecard that hides the rows without the words that are typed into it.
addEventListener("DOMContentLoaded", () => {
  const rows = [...document.querySelectorAll("table.evidence tbody tr")];
  const texts = rows.map(row => row.textContent.toLowerCase());
  const label = document.createElement("label"), count = document.createElement("output");
  label.className = "scorecard-filter";
  label.innerHTML = `Show rows with the words <input type="search" autocomplete="off">`;
  label.append(count);
  label.addEventListener("input", event => {
    const words = event.target.value.toLowerCase().split(/\s+/);
    rows.forEach((row, i) => { row.hidden = !words.every(word => texts[i].includes(word)); });
    count.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length} claims`;
  });
  document.querySelector("article section section").before(label);
});
