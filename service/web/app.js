// The search page: what is asked lives in `query`, what is shown follows from the last answer.
// No build step, no dependency; everything shown is set as text, never as markup.

import { listenToDrops } from "/static/drops.js";
import { askJson, hasKey, keyForm, showPicture, wantsKey } from "/static/keys.js";
import { offerRerank, onRerank, orderOf, rerankIsOn, reranks, turnRerank, worthOf } from "/static/rerank.js";
import { drawTimeline, fitLabels, make, milliseconds } from "/static/timeline.js";

const PAGE_SIZE = 30;
const EXAMPLES = ["red heart", "cat", "rain", "pizza", "airplane", "sad face"];
const RETRY_MS = 1500;
// Smaller pictures are drawings: they get a margin instead of being blown up to the edge.
const PHOTO_PX = 200;
const PLACEHOLDER = matchMedia("(max-width: 560px)").matches
  ? "Describe a picture"
  : "Describe a picture, or drop one here";
const $ = (id) => document.getElementById(id);

/** What is asked: {kind: "text", text} | {kind: "image", file} | {kind: "similar", id, name}. */
let query = null;
let info = null;
let shown = 0;
let running = null;
let retry = 0;
const credits = new Map();

// --- asking -------------------------------------------------------------------------------------

function side() {
  return document.querySelector("input[name=side]:checked").value;
}

function indexName() {
  return $("index").value || "default";
}

function requestOf(offset) {
  const options = { index: indexName(), k: PAGE_SIZE, offset, modality: side() };
  if (reranks(query.kind, side())) options.rerank = true;
  if (query.kind === "image") {
    const form = new FormData();
    form.append("image", query.file);
    for (const [name, value] of Object.entries(options)) form.append(name, value);
    return ["/search/image", { method: "POST", body: form }];
  }
  const own = query.kind === "text" ? { query: query.text } : { id: query.id };
  const headers = { "Content-Type": "application/json" };
  return [`/search/${query.kind}`, { method: "POST", headers, body: JSON.stringify({ ...own, ...options }) }];
}

async function search({ more = false } = {}) {
  clearTimeout(retry);
  running?.abort();
  const mine = (running = new AbortController());
  if (!more) showLoading();
  $("more").disabled = true;
  try {
    const [url, options] = requestOf(more ? shown : 0);
    showAnswer(await askJson(url, { ...options, signal: mine.signal }), more);
  } catch (error) {
    if (error.name === "AbortError") return;
    if (more && !wantsKey(error)) $("status").textContent = `No more came: ${error.message}`;
    else showError(error);
  } finally {
    if (mine === running) $("more").disabled = false;
  }
}

function ask(next, { remember = true } = {}) {
  if (query?.preview && query !== next) URL.revokeObjectURL(query.preview);
  query = next;
  showQuery();
  if (remember) history.pushState(null, "", addressOf(next));
  if (next) search();
  else {
    running?.abort();
    showNothing();
  }
}

function askText(text) {
  const trimmed = text.trim();
  if (trimmed) ask({ kind: "text", text: trimmed });
  else if (query?.kind === "image" || query?.kind === "similar") search();
  else $("query").focus();
}

function askImage(file) {
  if (query?.preview) URL.revokeObjectURL(query.preview);
  const limit = info?.limits.max_image_bytes;
  query = { kind: "image", file, name: file.name || "Pasted picture", preview: URL.createObjectURL(file) };
  showQuery();
  if (limit && file.size > limit) {
    showError({ message: `This picture has ${megabytes(file.size)}; the most is ${megabytes(limit)}.`, status: 413 });
    return;
  }
  ask(query);
}

function askSimilar(id, name) {
  ask({ kind: "similar", id, name });
  scrollTo({ top: 0, behavior: "smooth" });
  $("results").focus({ preventScroll: true });
}

// --- addresses ----------------------------------------------------------------------------------

function addressOf(next) {
  const parts = new URLSearchParams();
  if (next?.kind === "text") parts.set("q", next.text);
  if (next?.kind === "similar") parts.set("like", next.id);
  if (side() !== "image") parts.set("in", side());
  if (indexName() !== "default") parts.set("index", indexName());
  if (rerankIsOn()) parts.set("rerank", "1");
  const text = parts.toString();
  return text ? `/?${text}` : "/";
}

function followAddress() {
  const parts = new URLSearchParams(location.search);
  const wanted = parts.get("in") === "text" ? "text" : "image";
  document.querySelector(`input[name=side][value=${wanted}]`).checked = true;
  const index = parts.get("index");
  if (index && [...$("index").options].some((option) => option.value === index)) $("index").value = index;
  turnRerank(parts.get("rerank") === "1");
  const text = parts.get("q");
  const like = parts.get("like");
  if (like) ask({ kind: "similar", id: like, name: like }, { remember: false });
  else ask(text?.trim() ? { kind: "text", text: text.trim() } : null, { remember: false });
}

// --- showing ------------------------------------------------------------------------------------

function pictureOf(id, size) {
  return `/items/${encodeURIComponent(id)}/image?index=${encodeURIComponent(indexName())}&size=${size}`;
}

function showQuery() {
  const pictured = query?.kind === "image" || query?.kind === "similar";
  document.body.classList.toggle("searched", Boolean(query));
  $("pill").hidden = !pictured;
  if (pictured) {
    $("pill-image").hidden = false;
    if (query.preview) $("pill-image").src = query.preview;
    else showPicture($("pill-image"), pictureOf(query.id, 64));
    $("pill-name").textContent = query.kind === "similar" ? `Like ${query.name}` : query.name;
  }
  $("query").value = query?.kind === "text" ? query.text : "";
  $("query").placeholder = pictured ? "" : PLACEHOLDER;
  const what = query?.text ?? query?.name;
  document.title = what ? `${what} · hivlp` : "hivlp";
}

function showNothing() {
  for (const id of ["status-row", "notice", "more"]) $(id).hidden = true;
  $("grid").replaceChildren();
}

function showLoading() {
  showNothing();
  $("results").setAttribute("aria-busy", "true");
  const ghosts = Array.from({ length: 12 }, () => {
    const place = make("li");
    const card = make("div", "hit ghost");
    card.append(make("div", "tile"), make("div", "label"));
    card.lastChild.append(make("span", "name"));
    place.setAttribute("aria-hidden", "true");
    place.append(card);
    return place;
  });
  $("grid").replaceChildren(...ghosts);
}

function showAnswer(answer, more) {
  $("results").removeAttribute("aria-busy");
  const cards = answer.hits.map(card);
  if (more) $("grid").append(...cards);
  else $("grid").replaceChildren(...cards);
  shown = $("grid").childElementCount;
  $("more").hidden = answer.returned < PAGE_SIZE || shown > info.limits.max_offset;
  if (!shown) showNotice("Nothing found", "Try other words, or a picture.");
  $("status-row").hidden = !shown;
  const [count, rest] = [make("strong", "", `${shown} ${shown === 1 ? "result" : "results"}`), make("span")];
  const how = answer.cached ? "from the cache" : `${answer.plan}, level ${answer.exit_level}`;
  const cut = answer.truncated ? " · the text was cut to the model's length" : "";
  const order = orderOf(answer, reranks(query.kind, side()));
  rest.textContent = ` in ${milliseconds(answer.took_ms)} · ${how}${order}${cut}`;
  $("status").replaceChildren(count, rest);
  $("how").hidden = answer.stages.length === 0;
  showCredits(answer.hits);
  drawTimeline($("chart"), answer);
}

/** Pictures whose metadata names an attribution are credited while they are shown. */
function showCredits(hits) {
  for (const { metadata } of hits) {
    if (!metadata?.attribution || credits.has(metadata.attribution)) continue;
    credits.set(metadata.attribution, { name: metadata.attribution, licence: metadata.licence ?? "", url: "" });
    $("sources").append(credit(credits.get(metadata.attribution)));
  }
}

function nameOf(hit) {
  const metadata = hit.metadata ?? {};
  return String(metadata.name ?? metadata.title ?? hit.id);
}

function card(hit) {
  const place = make("li");
  const button = make("button", "hit");
  const name = nameOf(hit);
  const [worth, told] = worthOf(hit);
  button.type = "button";
  button.setAttribute("aria-label", `${hit.rank}. ${hit.text ?? name}, ${told}. More like this`);
  button.append(tile(hit, name));
  if (hit.text) button.append(make("p", "quote", hit.text));
  const label = make("div", "label");
  const shownName = make("span", "name", name);
  shownName.title = name;
  label.append(shownName, make("span", "score", worth));
  label.lastChild.title = told;
  button.append(label);
  button.addEventListener("click", () => askSimilar(hit.id, name));
  place.append(button);
  return place;
}

function tile(hit, name) {
  const frame = make("div", "tile");
  const image = make("img");
  image.alt = "";
  image.loading = "lazy";
  image.decoding = "async";
  image.addEventListener("load", () => image.classList.toggle("photo", image.naturalWidth >= PHOTO_PX));
  image.addEventListener("error", () => image.replaceWith(make("span", "none", [...name][0] ?? "?")));
  showPicture(image, pictureOf(hit.id, 320));
  frame.append(image, make("span", "hint", "More like this"));
  return frame;
}

function showNotice(title, text, { bad = false, again = false, detail = "" } = {}) {
  const sentence = text.charAt(0).toUpperCase() + text.slice(1);
  const parts = [make("h2", "", title), make("p", "", sentence)];
  if (again) {
    const button = make("button", "", "Try again");
    button.type = "button";
    button.addEventListener("click", () => (info ? search() : start()));
    parts.push(button);
  }
  if (detail) parts.push(make("small", "", detail));
  $("notice").classList.toggle("bad", bad);
  $("notice").replaceChildren(...parts);
  $("notice").hidden = false;
}

function showError(error) {
  $("results").removeAttribute("aria-busy");
  showNothing();
  if (error.code === "not_ready") {
    showNotice("Just a moment", "The models and indexes are still loading.");
    retry = setTimeout(() => start(), RETRY_MS);
    return;
  }
  if (wantsKey(error)) {
    showNotice("A key, please", "This service answers those who have a key to it.");
    $("notice").append(keyForm(start));
    $("notice").querySelector("input").focus();
    return;
  }
  const titles = { 413: "That is too large", 415: "That picture can't be read", 422: "That can't be searched", 429: "Busy right now", 404: "Not here" };
  const offline = error.status === undefined;
  const text = offline ? "The server can't be reached." : error.message;
  const detail = error.request_id ? `Request ${error.request_id}` : "";
  showNotice(titles[error.status] ?? "Something went wrong", text, { bad: true, again: offline || error.status === 429 || error.status >= 500, detail });
}

function megabytes(bytes) {
  return `${(bytes / 2 ** 20).toFixed(1)} MB`;
}

// --- starting -----------------------------------------------------------------------------------

function showServer() {
  const choices = info.indexes.map((index) => {
    const option = make("option", "", index.name);
    option.value = index.name;
    return option;
  });
  $("index").replaceChildren(...choices);
  if (info.indexes.some((index) => index.name === "default")) $("index").value = "default";
  $("index-choice").hidden = info.indexes.length < 2;
  // The browser sends no key where a link leads.
  for (const link of document.querySelectorAll(".foot .keyed")) link.hidden = hasKey();
  for (const model of info.models)
    for (const source of model.sources) credits.set(source.attribution || source.name, source);
  $("sources").replaceChildren(...[...credits.values()].map(credit));
  showIndex();
}

function showIndex() {
  const index = info.indexes.find((one) => one.name === indexName()) ?? info.indexes[0];
  $("holding").textContent = `${index.items.toLocaleString()} items`;
  $("sides").hidden = Object.keys(index.rows).length < 2;
  offerRerank(index);
  if (!index.rows[side()]) document.querySelector(`input[name=side][value=${Object.keys(index.rows)[0]}]`).checked = true;
}

function credit(source) {
  const line = make("li");
  const text = source.attribution || source.name;
  const safe = /^https?:\/\//.test(source.url);
  const name = make(safe ? "a" : "span", "", text);
  if (safe) Object.assign(name, { href: source.url, rel: "noopener noreferrer", target: "_blank" });
  line.append(name, make("span", "", source.licence ? ` · ${source.licence}` : ""));
  return line;
}

async function start() {
  try {
    info = await askJson("/info");
    showServer();
  } catch (error) {
    showError(error);
    return;
  }
  $("notice").hidden = true;
  followAddress();
}

function moveInGrid(event) {
  const cards = [...$("grid").querySelectorAll("button.hit")];
  const here = cards.indexOf(document.activeElement);
  if (here < 0) return;
  const columns = getComputedStyle($("grid")).gridTemplateColumns.split(" ").length;
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
  const next = cards[here + (step ?? NaN)];
  if (!next) return;
  event.preventDefault();
  next.focus();
}

function listen() {
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    askText($("query").value);
  });
  $("home").addEventListener("click", (event) => {
    event.preventDefault();
    ask(null);
    $("query").focus();
  });
  $("pill-clear").addEventListener("click", () => {
    ask(null);
    $("query").focus();
  });
  $("pill-image").addEventListener("error", () => ($("pill-image").hidden = true));
  $("file").addEventListener("change", () => {
    if ($("file").files.length) askImage($("file").files[0]);
    $("file").value = "";
  });
  $("more").addEventListener("click", () => search({ more: true }));
  $("index").addEventListener("change", () => {
    showIndex();
    ask(query?.kind === "similar" ? null : query);
  });
  for (const choice of document.querySelectorAll("input[name=side]")) {
    choice.addEventListener("change", () => query && ask(query));
  }
  onRerank(() => query && ask(query));
  for (const example of EXAMPLES) {
    const chip = make("button", "", example);
    chip.type = "button";
    chip.addEventListener("click", () => askText(example));
    $("chips").append(chip);
  }
  $("how").addEventListener("toggle", fitLabels);
  addEventListener("resize", fitLabels);
  addEventListener("popstate", followAddress);
  addEventListener("keydown", (event) => {
    const typing = event.target.matches("input[type=search], select");
    if (event.key === "/" && !typing) {
      event.preventDefault();
      $("query").select();
    } else if (event.key.startsWith("Arrow") && !typing) moveInGrid(event);
  });
  addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])].find((one) => one.type.startsWith("image/"));
    if (file) askImage(file);
  });
  listenToDrops($("drop"), askImage);
}

listen();
start();
