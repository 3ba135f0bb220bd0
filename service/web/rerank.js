// Re-ranking on the page: the switch, who it is for, and what a match looks like.

const row = document.getElementById("rerank-choice");
const box = document.getElementById("rerank");

/** Show the switch where the index's model has a re-ranker. */
export function offerRerank(index) {
  row.hidden = !index.rerank;
}

/** Whether the switch is on, and there to be seen. */
export function rerankIsOn() {
  return !row.hidden && box.checked;
}

export function turnRerank(on) {
  box.checked = on;
}

export function onRerank(changed) {
  box.addEventListener("change", changed);
}

/** Whether a query makes pairs: a text with pictures, or a picture with captions. */
export function reranks(kind, side) {
  const pair = (kind === "text" && side === "image") || (kind === "image" && side === "text");
  return pair && rerankIsOn();
}

/** What an answer says of its order, behind how it was found. */
export function orderOf(answer, asked) {
  if (!asked) return "";
  if (!answer.degraded) return " · re-ranked"; // a later page may lie behind all that were compared
  const compared = answer.hits.some((hit) => "match" in hit);
  return compared ? " · not all could be re-ranked" : " · as found: re-ranking took too long or failed";
}

/** How good a hit is, short and in words: its match where it was compared, else its score. */
export function worthOf(hit) {
  if (!("match" in hit)) return [hit.score.toFixed(2), `score ${hit.score.toFixed(2)}`];
  const match = `${Math.round(100 * hit.match)} %`;
  return [match, `match ${match}, score ${hit.score.toFixed(2)}`];
}
