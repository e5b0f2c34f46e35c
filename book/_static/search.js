// Chapters before pages, pages before the reference.
var Scorer = {
  score: ([page, title, anchor, text, score]) =>
    score + (page.startsWith("notebooks/") ? 20 : /^book\/(api|changelog|errors)/.test(page) ? -30 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
