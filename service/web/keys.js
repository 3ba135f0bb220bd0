// Requests with the key of this tab. Where the service asks for one, so does the page; it is kept in
// sessionStorage: for as long as the tab lives, and for no other site.

import { make } from "/static/timeline.js";

const NAME = "hivlp-key";
const SHAPE = /^[\x21-\x7e]+$/;
let key = stored();

function stored() {
  try {
    return sessionStorage.getItem(NAME);
  } catch {
    return null; // storage is switched off: the key lives as long as the page
  }
}

function keep(next) {
  key = next;
  try {
    if (next) sessionStorage.setItem(NAME, next);
    else sessionStorage.removeItem(NAME);
  } catch {}
}

export function hasKey() {
  return key !== null;
}

/** Whether an error says that a key is needed, or another one. */
export function wantsKey(error) {
  return error.status === 401 || error.code === "wrong_key";
}

async function send(url, options = {}) {
  const headers = key ? { ...options.headers, Authorization: `Bearer ${key}` } : options.headers;
  return fetch(url, { ...options, headers });
}

/** The JSON of an answer; an error has the fields of the service's, and `status`. */
export async function askJson(url, options) {
  const response = await send(url, options);
  const body = await response.json();
  if (!response.ok) throw Object.assign(new Error(body.error.message), body.error, { status: response.status });
  return body;
}

/** Show a picture. The browser itself sends no key with one, so then its bytes are asked for. */
export async function showPicture(image, url) {
  if (!key) {
    image.src = url;
    return;
  }
  try {
    const response = await send(url);
    if (!response.ok) throw new Error(response.status);
    const held = URL.createObjectURL(await response.blob());
    for (const end of ["load", "error"]) image.addEventListener(end, () => URL.revokeObjectURL(held), { once: true });
    image.src = held;
  } catch {
    image.dispatchEvent(new Event("error"));
  }
}

/** What asks for a key; `then` is called when there is one to try. */
export function keyForm(then) {
  const wrong = hasKey();
  keep(null);
  const form = make("form", "key");
  const label = make("label", "", "Key");
  const input = make("input");
  const button = make("button", "", "Continue");
  Object.assign(input, { type: "password", name: "key", required: true, autocomplete: "off", spellcheck: false });
  label.append(input);
  form.append(label, button);
  if (wrong) form.prepend(make("p", "", "That key is not one of this service."));
  input.addEventListener("input", () => {
    input.setCustomValidity(SHAPE.test(input.value.trim()) ? "" : "A key has no blanks and no other than plain letters, digits and signs.");
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    keep(input.value.trim());
    then();
  });
  return form;
}
