// Search shows prose before pages of the reference that have the same words in their text.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 0.5,
  score: ([page, , anchor, , score]) =>
    page.startsWith("reference/") && !anchor && score < 15 ? score - 3 : score,
};
