// The API's documentation, drawn from /openapi.json: endpoints by tag, fields, status codes.

import { askJson, keyForm, wantsKey } from "/static/keys.js";
import { make } from "/static/timeline.js";

const routes = document.getElementById("routes");

const known = (document_, schema) =>
  schema?.$ref ? document_.components.schemas[schema.$ref.split("/").pop()] : schema ?? {};

function fields(document_, schema) {
  const full = known(document_, schema);
  const parts = full.allOf ? full.allOf.flatMap((part) => fields(document_, part)) : [];
  const wanted = new Set(full.required ?? []);
  const own = Object.entries(full.properties ?? {}).map(([name, value]) => ({ name, value, wanted: wanted.has(name) }));
  return [...parts, ...own];
}

function typeOf(document_, schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map((one) => typeOf(document_, one)).join(" | ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.type === "array") return `[${typeOf(document_, schema.items ?? {})}]`;
  return schema.type ?? "any";
}

function table(document_, rows) {
  const element = make("table");
  for (const { name, value, wanted } of rows) {
    const row = make("tr");
    const first = make("td");
    first.append(make("code", "", name), wanted ? " (needed)" : "");
    const standard = value.default === undefined ? "" : ` = ${JSON.stringify(value.default)}`;
    const type = make("td");
    type.append(make("code", "", typeOf(document_, value) + standard));
    row.append(first, type, make("td", "", value.description ?? ""));
    element.append(row);
  }
  return element;
}

function route(document_, verb, path, operation) {
  const box = make("details", "route");
  const head = make("summary");
  head.append(make("b", "verb", verb.toUpperCase()), make("code", "", path), make("span", "", operation.description ?? ""));
  const body = make("div");
  for (const [media, content] of Object.entries(operation.requestBody?.content ?? {})) {
    body.append(make("h3", "", media), table(document_, fields(document_, content.schema)));
  }
  const given = (operation.parameters ?? []).map((one) => ({ name: one.name, value: { ...one.schema, description: one.description }, wanted: one.required }));
  if (given.length) body.append(make("h3", "", "parameters"), table(document_, given));
  const answers = Object.entries(operation.responses).map(([status, answer]) => ({
    name: status,
    value: { ...(Object.values(answer.content ?? {})[0]?.schema ?? {}), description: answer.description },
  }));
  body.append(make("h3", "", "answers"), table(document_, answers));
  box.append(head, body);
  return box;
}

async function draw() {
  let found;
  try {
    found = await askJson("/openapi.json");
  } catch (error) {
    const notice = make("div", "notice");
    notice.append(make("p", "", error.message));
    if (wantsKey(error)) notice.append(keyForm(draw));
    routes.replaceChildren(notice);
    return;
  }
  const groups = new Map();
  for (const [path, verbs] of Object.entries(found.paths)) {
    for (const [verb, operation] of Object.entries(verbs)) {
      const tag = operation.tags?.[0] ?? "other";
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(route(found, verb, path, operation));
    }
  }
  routes.replaceChildren(...[...groups].flatMap(([tag, drawn]) => [make("h2", "", tag), ...drawn]));
}

draw();
