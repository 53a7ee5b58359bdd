// The facts of the service, as the server sends them.

/** Return `before` with a merge patch (RFC 7396) applied; change nothing in place. */
export function patched(before, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const isObject = before && typeof before === "object" && !Array.isArray(before);
  const found = isObject ? { ...before } : {};
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete found[key];
    else found[key] = patched(found[key], value);
  }
  return found;
}

/** Call `tell(facts)` after each change; call `tell(facts, true)` if the server is unreachable. */
export function follow(tell) {
  let facts = {};
  const source = new EventSource("/facts");
  source.addEventListener("facts", (event) => tell((facts = JSON.parse(event.data))));
  source.addEventListener("patch", (event) => tell((facts = patched(facts, JSON.parse(event.data)))));
  source.onerror = () => tell(facts, true); // EventSource reconnects by itself
}

/** Return the tenants and their keys; throw an Error with the service's reason if refused. */
export async function tenants() {
  const answer = await fetch("/tenants");
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || answer.statusText);
  return found;
}

/** Request an operation; throw an Error with the service's reason if refused. */
export async function ask(operation, body) {
  const answer = await fetch(`/do/${operation}`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || answer.statusText);
  return found;
}

export const seconds = (s) =>
  s === undefined || s === null ? "–"
    : s < 0.001 ? `${(1e6 * s).toFixed(0)} µs`
    : s < 1 ? `${(1e3 * s).toPrecision(3)} ms`
    : s < 100 ? `${s.toPrecision(3)} s` : `${Math.round(s)} s`;

export const share = (part) => `${Math.round(100 * part)} %`;

export const rate = (r) => (!r ? "0" : r < 10 ? r.toFixed(1) : Math.round(r).toLocaleString("en"));

export const bytes = (n) =>
  !n ? "–" : n < 2 ** 30 ? `${Math.round(n / 2 ** 20)} MiB` : `${(n / 2 ** 30).toFixed(1)} GiB`;

export const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");
