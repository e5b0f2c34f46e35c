// Chapters before pages, pages before the reference; how to run the book first where its name is asked for.
// A line of text under each hit, where a page may read another (not from disk).
DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = location.protocol !== "file:";
var Scorer = {
  asked: new URLSearchParams(location.search).get("q") ?? "",
  score: ([page, title, anchor, text, score]) =>
    page === "book/how_to_run" && /\b(install|set.?up|run)/i.test(Scorer.asked)
      ? score + 100
      : score + (page.startsWith("notebooks/") ? 20 : /^book\/(api|changelog)/.test(page) ? -30 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
