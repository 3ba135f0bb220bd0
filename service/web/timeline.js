// The chart of a search's stages: a lane each for encoding, searching and re-ranking, and the rest.

/** An element with a class and text; text is never markup. */
export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

export function milliseconds(value) {
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
}

/** Draw an answer's stages into `chart`. */
export function drawTimeline(chart, answer) {
  const stages = answer.stages;
  if (!stages.length) return;
  const end = Math.max(...stages.map((stage) => stage.start_ms + stage.duration_ms), 0.001);
  const lane = (title, className, wanted) => {
    const row = make("div", `lane ${className}`);
    const track = make("div", "track");
    for (const stage of stages.filter(wanted)) track.append(bar(stage, end));
    row.append(make("span", "", title), track);
    return row;
  };
  const encoded = stages.some((stage) => stage.name === "encode");
  const scale = make("div", "scale");
  scale.append(make("span", "", "0"), make("span", "", milliseconds(end / 2)), make("span", "", milliseconds(end)));
  const both = overlap(stages);
  const told = !encoded
    ? "The item's own vector is the query: no encoder ran."
    : both > 0.05
    ? `The search of one level ran while the encoder worked on the next: ${milliseconds(both)} of searching cost nothing.`
    : "Each level is searched as soon as its part of the encoder is done.";
  chart.replaceChildren(
    ...(encoded ? [lane("encode", "encode", (stage) => stage.name === "encode")] : []),
    lane("search", "search", (stage) => stage.name === "search"),
    ...(stages.some(reranked) ? [lane("re-rank", "rerank", reranked)] : []),
    lane("other", "other", (stage) => !["encode", "search", "rerank"].includes(stage.name)),
    scale,
    make("p", "", told),
  );
  fitLabels();
}

function reranked(stage) {
  return stage.name === "rerank";
}

function bar(stage, end) {
  const label = stage.level ? `level ${stage.level}` : stage.name;
  const element = make("div", "bar");
  element.dataset.labels = JSON.stringify([label, String(stage.level ?? ""), ""]);
  element.style.left = `${(100 * stage.start_ms) / end}%`;
  element.style.width = `${(100 * stage.duration_ms) / end}%`;
  const kept = stage.candidates_out === null ? "" : `, ${stage.candidates_in} to ${stage.candidates_out} candidates`;
  element.title = `${stage.name} ${stage.level ? `level ${stage.level}` : ""}: ${milliseconds(stage.duration_ms)}${kept}`;
  return element;
}

/** The longest label that a bar has room for; measured, so only while the chart is open. */
export function fitLabels() {
  for (const element of document.querySelectorAll(".bar")) {
    const labels = JSON.parse(element.dataset.labels);
    element.classList.remove("tight");
    element.textContent = labels[0];
    if (element.scrollWidth <= element.clientWidth) continue;
    element.classList.add("tight");
    element.textContent = labels[1];
    if (element.scrollWidth > element.clientWidth) element.textContent = labels[2];
  }
}

function overlap(stages) {
  const [encoding, searching] = ["encode", "search"].map((name) => stages.filter((stage) => stage.name === name));
  const until = (stage) => stage.start_ms + stage.duration_ms;
  let total = 0;
  for (const a of encoding)
    for (const b of searching)
      total += Math.max(0, Math.min(until(a), until(b)) - Math.max(a.start_ms, b.start_ms));
  return total;
}
