// The panels of the page, which show facts.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { bytes, clock, rate, seconds, share, tenants } from "./facts.js";

const MANY = 24; // if a stage has more replicas than this, each is a small square

/** Class, mark and words for the state of a replica; the mark works without colour. */
export function stateOf(replica) {
  if (replica.is_silent) return ["lost", "✕", "silent"];
  if (replica.slow) return ["slow", "!", "slow"];
  if (replica.phase === "ready") return ["ready", "✓", "ready"];
  if (replica.phase === "spare") return ["spare", "○", "spare"];
  return ["starting", "…", replica.note ? `${replica.phase}: ${replica.note}` : replica.phase];
}

export function Numbers({ facts }) {
  const models = Object.values(facts.models);
  const sum = (name) => models.reduce((total, model) => total + (model[name] || 0), 0);
  const one = (title, value, kind = "", hint = "") =>
    html`<div title=${hint}><dt>${title}</dt><dd class=${kind}>${value}</dd></div>`;
  return html`<dl class="numbers">
    ${one("requests/s", rate(sum("requests_s")))}
    ${one("tokens/s", rate(sum("tokens_s")))}
    ${one("in flight", sum("in_flight"))}
    ${one("waiting at gateways", sum("waiting"), sum("waiting") ? "warn" : "", "without a replica yet")}
    ${one("errors/s", rate(sum("failures_s")), sum("failures_s") ? "bad" : "")}
    ${one("saved", facts.replayed + facts.handed_over, "good",
      `${facts.replayed} streams and requests continued after the loss of a replica, ` +
      `and ${facts.handed_over} connections after the loss of a gateway`)}
    ${one("streams cut", facts.cut, facts.cut ? "bad" : "good", "ended with an error after their first token")}
    ${one("tokens", facts.tokens.toLocaleString("en"), "", "delivered since the service started")}
  </dl>`;
}

export function Alerts({ facts, isCut }) {
  const found = [...(facts.troubles || [])];
  if (isCut) found.unshift(`the page has lost the connection to its server, and reconnects by itself; everything below is out of date`);
  if (!found.length) return null;
  return html`<section class="alert" role="status"><h2 class="bad">Needs attention</h2>
    <ul>${found.map((each) => html`<li>${each}</li>`)}</ul></section>`;
}

function Replica({ name, replica, most, open }) {
  const [kind, mark, words] = stateOf(replica);
  const short = name.split("/").pop();
  const share = most ? Math.min(100, (100 * replica.load) / most) : 0;
  return html`<button class="replica ${kind}" data-name=${name} title="${name}: ${words}" onClick=${() => open(name)}>
    <span class="mark" aria-hidden="true">${mark}</span> <b>${short}</b> <span>${words}</span>
    <small>${replica.load} in work${replica.queued ? `, of these ${replica.queued} queued` : ""}, ${replica.cores.toFixed(1)} cores${
      replica.step_s ? `, ${seconds(replica.step_s)} a step` : ""}${
      replica.kv_usage ? `, KV ${Math.round(100 * replica.kv_usage)} %` : ""}</small>
    <div class="bar"><i style=${{ width: `${share}%` }}></i></div>
  </button>`;
}

/** A model's rates and latencies, in one line. */
function inShort(model) {
  const both = (what, spread) => spread && `${what} ${seconds(spread.p50)} (p99 ${seconds(spread.p99)})`;
  return [both("answers", model.answers), both("queue", model.queue), both("first token", model.first_tokens), both("between tokens", model.between_tokens),
    model.kv_usage && `KV memory ${Math.round(100 * model.kv_usage)} %`,
    typeof model.prefix_hits === "number" && `${Math.round(100 * model.prefix_hits)} % of prompt tokens in prefix caches`]
    .filter(Boolean).join(" · ");
}

export function Model({ name, model, facts, series, open, act }) {
  const generates = model.first_tokens || model.tokens_s;
  return html`<section><h2>${name} <span class="quiet">${model.version}</span></h2>
    <div class="chain"><${Flows} chains=${model.chains}
      replicas=${Object.keys(facts.replicas).join()} />${model.stages.map((stage, k) => {
      const mine = Object.entries(facts.replicas).filter(([, r]) => r.model === name && r.stage === k);
      const most = Math.max(1, ...mine.map(([, r]) => r.load));
      const isMany = mine.length > MANY;
      const flows = mine.some(([, r]) => r.load || r.computing);
      return html`<div class="stage ${flows ? "flows" : ""} ${isMany ? "many" : ""}">
        <h3>${stage.name} <span class="quiet">${mine.filter(([, r]) => r.phase === "ready").length} of ${stage.wanted}</span>
          <button class="act" aria-label="one replica fewer of ${stage.name}" disabled=${stage.wanted < 1}
            onClick=${() => act(`Run ${stage.wanted - 1} replicas of ${name}/${stage.name}?`, "scale",
              { model: name, stage: stage.name, replicas: stage.wanted - 1, is_confirmed: true })}>−</button>
          <button class="act" aria-label="one replica more of ${stage.name}"
            onClick=${() => act(`Run ${stage.wanted + 1} replicas of ${name}/${stage.name}?`, "scale",
              { model: name, stage: stage.name, replicas: stage.wanted + 1, is_confirmed: true })}>+</button>
        </h3>
        ${mine.map(([each, replica]) => html`<${Replica} key=${each} name=${each} replica=${replica} most=${most} open=${open} />`)}
      </div>`;
    })}</div>
    <div class="charts">
      <${Chart} title=${generates ? "tokens/s" : "requests/s"} points=${series} at=${generates ? 2 : 1} shown=${rate} events=${facts.events} />
      <${Chart} title="in flight" points=${series} at=${3} shown=${String} events=${facts.events} />
      <${Chart} title=${generates ? "first token, p99" : "answer, p99"} points=${series} at=${generates ? 5 : 4} shown=${seconds} events=${facts.events} />
      ${generates && html`<${Chart} title="KV memory, fullest replica" points=${series} at=${6} shown=${share} events=${facts.events} />
        <${Chart} title="prompt tokens in prefix caches" points=${series} at=${7} shown=${share} events=${facts.events} />`}
    </div>
    <p class="quiet">${inShort(model)}</p>
  </section>`;
}

const COLOURS = 6; // of chains; see style.css

/** Lines through the replicas of each chain, drawn over the stages; width by number of streams. */
function Flows({ chains, replicas }) {
  const place = useRef(null);
  const [lines, setLines] = useState([]);
  const draw = () => {
    const svg = place.current;
    if (!svg) return;
    const box = svg.parentElement, zero = box.getBoundingClientRect();
    const at = {};
    for (const each of box.querySelectorAll("[data-name]")) at[each.dataset.name] = each.getBoundingClientRect();
    const most = Math.max(1, ...chains.map(([, count]) => count));
    const widest = chains.length > 12 ? 1 : 4;
    const offset = zero.left - box.scrollLeft;
    setLines(chains.slice(0, 40).map(([names, count], n) => {
      const boxes = names.map((name) => at[name]);
      let path = "";
      for (let k = 1; k < boxes.length; k += 1) {
        const [a, b] = [boxes[k - 1], boxes[k]];
        if (!a || !b) continue; // a replica that is gone
        const [x, y] = [a.right - offset, a.top + a.height / 2 - zero.top];
        const [u, v] = [b.left - offset, b.top + b.height / 2 - zero.top];
        path += `M${x} ${y}C${(x + u) / 2} ${y} ${(x + u) / 2} ${v} ${u} ${v}`;
      }
      return { path, width: 1.2 + (widest * count) / most, kind: n % COLOURS, text: `${names.join(" → ")}: ${count} streams` };
    }));
    svg.style.width = `${box.scrollWidth}px`;
  };
  useEffect(draw, [JSON.stringify(chains), replicas]);
  useEffect(() => {
    const watch = new ResizeObserver(draw);
    watch.observe(place.current.parentElement);
    return () => watch.disconnect();
  }, []);
  return html`<svg class="flows" ref=${place} aria-hidden="true">${lines.map((each) =>
    html`<path class="chain${each.kind}" d=${each.path} style=${{ strokeWidth: each.width }}><title>${each.text}</title></path>`)}</svg>`;
}

/** Words for the state of a stream; each attempt after the first follows a loss or a move. */
export const stateOfStream = (s) => `${s.phase}${s.attempt ? `, attempt ${s.attempt + 1}` : ""}${s.losses ? ", suspected" : ""}`;

/** The live streams, those in trouble first. */
export function Streams({ facts, look, act }) {
  const found = Object.entries(facts.streams || {});
  const rank = ([, s]) => [s.losses || s.phase === "waiting" || s.phase === "paused" ? 0 : 1, s.began_at];
  found.sort((a, b) => rank(a)[0] - rank(b)[0] || rank(a)[1] - rank(b)[1]);
  const [given, give] = useState("");
  const go = (event) => { event.preventDefault(); if (given.trim()) look(given.trim()); };
  return html`<section><h2>Streams <span class="quiet">${found.length ? `${found.length} shown` : "none runs"}</span>
      <form class="find" onSubmit=${go}><input value=${given} onInput=${(e) => give(e.target.value)} placeholder="id of a request"
        aria-label="id of a request" /><button class="act">Show request</button></form></h2>
    ${found.length > 0 && html`<div class="scroll" tabindex="0"><table><thead><tr><th>request</th><th>tenant</th><th>model</th><th>state</th>
      <th class="number">tokens</th><th class="number">for</th><th class="number">longest pause</th><th>chain</th><th></th></tr></thead>
    <tbody>${found.map(([key, s]) => html`<tr key=${key} class=${s.losses ? "warn" : ""}>
      <td><button class="act" title=${s.request} onClick=${() => look(s.request)}>${s.request.slice(0, 12)}</button></td>
      <td>${s.tenant || "–"}</td><td>${s.model}</td><td>${stateOfStream(s)}</td>
      <td class="number">${s.made ? `${s.made} after ${s.prompt}` : `none yet, prompt ${s.prompt}`}</td><td class="number">${seconds(Math.max(0, facts.at - s.began_at))}</td>
      <td class="number">${s.longest_s ? seconds(s.longest_s) : "–"}</td>
      <td>${s.chain.map((name) => name.split("/").pop()).join(" → ") || "–"}</td>
      <td><button class="act danger" aria-label="cancel ${s.request}" onClick=${() => act(`Cancel request ${s.request}? Its client gets an error.`,
        "cancel", { request: s.request })}>cancel</button></td></tr>`)}</tbody></table></div>`}</section>`;
}

const LOSSES = ["lost", "outgrown", "node lost", "connections"];

/** A line over the last ten minutes; losses are thin marks. */
function Chart({ title, points, at, shown, events }) {
  if (!points || points.length < 2) return html`<figure><figcaption>${title}</figcaption><svg class="chart"></svg></figure>`;
  const last = points[points.length - 1];
  const from = Math.max(points[0][0], last[0] - 600), took = Math.max(1, last[0] - from);
  const within = points.filter((p) => p[0] >= from);
  const most = Math.max(...within.map((p) => p[at]), 1e-9);
  const x = (time) => (300 * (time - from)) / took;
  const line = within.map((p, n) => `${n ? "L" : "M"}${x(p[0]).toFixed(1)} ${(58 - (52 * p[at]) / most).toFixed(1)}`).join("");
  const marks = Object.values(events || {}).filter((e) => LOSSES.includes(e.kind) && e.at >= from && e.at <= last[0]);
  return html`<figure><figcaption><span>${title}</span><span>${shown(last[at])} now, at most ${shown(most)}</span></figcaption>
    <svg class="chart" viewBox="0 0 300 64" preserveAspectRatio="none" role="img" aria-label="${title}: ${shown(last[at])} now">
      <path class="area" d="${line}L${x(last[0])} 62L0 62Z" /><path d=${line} />
      ${marks.map((e) => html`<line x1=${x(e.at)} x2=${x(e.at)} y1="2" y2="62"><title>${e.text}</title></line>`)}
    </svg></figure>`;
}

export function Gateways({ facts, open, act }) {
  return html`<section><h2>Gateways <button class="act danger"
      onClick=${() => act("Kill a gateway? Its clients notice a pause.", "chaos", { action: "kill", model: "gateway" })}>kill one</button></h2>
    <table><thead><tr><th>gateway</th><th>phase</th><th class="number">in flight</th><th class="number">waiting</th><th class="number">cores</th></tr></thead>
    <tbody>${Object.entries(facts.gateways).map(([name, each]) => html`<tr key=${name}>
      <td><button class="act" onClick=${() => open(name)}>${name}</button></td><td>${each.phase}</td>
      <td class="number">${each.in_flight}</td><td class="number">${each.waiting}</td><td class="number">${each.cores.toFixed(1)}</td></tr>`)}
    </tbody></table></section>`;
}

const KINDS = { lost: "bad", "rolled back": "bad", unplaced: "bad", outgrown: "bad", "node lost": "bad", "probe failed": "bad",
  slow: "warn", quarantined: "warn", chaos: "warn", ready: "good", updated: "good", up: "good" };

export function Events({ facts, kind, choose }) {
  const all = Object.values(facts.events || {}).sort((a, b) => b.number - a.number);
  const kinds = [...new Set(all.map((e) => e.kind))].sort();
  const shown = all.filter((e) => !kind || e.kind === kind);
  return html`<section><h2>Events <select aria-label="kind of events" value=${kind} onChange=${(e) => choose(e.target.value)}>
      <option value="">all</option>${kinds.map((k) => html`<option value=${k}>${k}</option>`)}</select></h2>
    <div class="scroll" tabindex="0"><table class="events"><tbody>
      ${shown.map((e) => html`<tr key=${e.number} class=${KINDS[e.kind] || ""}><td>${clock(e.at)}</td><td>${e.kind}</td><td>${e.text}</td></tr>`)}
    </tbody></table></div></section>`;
}

export function Tenants({ facts }) {
  const found = Object.entries(facts.tenants).sort(([, a], [, b]) => b.in_flight - a.in_flight || b.requests_s - a.requests_s);
  if (!found.length) return null;
  const words = (refused) => Object.entries(refused).map(([why, n]) => `${why}: ${Math.round(n)}`).join(", ");
  return html`<section><h2>Tenants</h2><div class="scroll" tabindex="0"><table>
    <thead><tr><th>tenant</th><th class="number">requests/s</th><th class="number">in flight</th>
      <th class="number" title="requests without a first token or an answer">waiting</th><th class="number" title="of the waiting streams">prompt tokens</th>
      <th class="number" title="requests whose output has a grammar">structured</th><th>budgets</th><th>refused so far</th></tr></thead>
    <tbody>${found.map(([name, each]) => html`<tr key=${name} class=${Object.keys(each.refused_s).length ? "bad" : ""}>
      <td>${name || "(no valid key)"}</td><td class="number">${rate(each.requests_s)}</td>
      <td class="number">${each.in_flight}</td><td class="number">${each.waiting}</td>
      <td class="number">${each.prompt_tokens.toLocaleString("en")}</td><td class="number">${each.structured}</td>
      <td>${Object.entries(each.budgets || {}).map(([limit, [used, allowed]]) => html`<div>${used.toLocaleString("en")} of
        ${` ${allowed.toLocaleString("en")} ${limit.replaceAll("_", " ")}`}<div class="bar"><i style=${{ width: `${Math.min(100, (100 * used) / allowed)}%` }}></i></div></div>`)}</td>
      <td>${words(each.refused) || "–"}</td></tr>`)}
    </tbody></table></div></section>`;
}

export function Machines({ facts }) {
  const [free, total] = facts.disk;
  return html`<section><h2>Machines ${total > 0 && html`<span class="quiet">disk of the state and logs: ${bytes(free) === "–" ? "nothing" : bytes(free)} of ${bytes(total)} free</span>`}</h2><table>
    <thead><tr><th>machine</th><th class="number">cores in use</th><th class="number" title="not booked by replicas">CPUs not booked</th>
      <th class="number" title="not booked by replicas">free memory</th><th class="number">replicas</th></tr></thead>
    <tbody>${Object.entries(facts.nodes).map(([name, node]) => html`<tr key=${name}><td>${name}</td>
      <td class="number">${facts.busy[name] === undefined ? "–" : `${(facts.busy[name] * node.cpus).toFixed(1)} of ${node.cpus}`}</td>
      <td class="number">${node.free_cpus.toFixed(1)} of ${node.cpus}</td>
      <td class="number">${bytes(node.free_memory_bytes)} of ${bytes(node.memory_bytes)}</td>
      <td class="number">${node.replicas.length}</td></tr>`)}</tbody></table></section>`;
}

export function Thoughts({ facts }) {
  if (!facts.thoughts.length) return null;
  return html`<section><h2>Reasons for scale and placement</h2><ul class="thoughts">${facts.thoughts.map((each) =>
    html`<li><b>${each.kind}${each.about ? ` of ${each.about}` : ""}</b>: ${each.what} <span class="quiet">${clock(each.at)}</span></li>`)}</ul></section>`;
}

/** The running spec, differences from it, and its update or rollback. */
export function Spec({ facts, act }) {
  const [spec, setSpec] = useState(null);
  const [text, setText] = useState(null);
  const show = () => fetch("/spec").then((a) => a.json()).then((found) => { setSpec(found); setText(found.text); });
  const versions = Object.values(facts.models).map((m) => m.version).join();
  useEffect(() => { if (spec) show(); }, [versions]);
  if (!spec) return html`<section><h2>Spec</h2><button class="act" onClick=${show}>Show what runs</button></section>`;
  return html`<section><h2>Spec</h2>
    ${spec.differences.length > 0 && html`<ul class="thoughts warn">${spec.differences.map((each) => html`<li>${each}</li>`)}</ul>`}
    <div class="form"><textarea rows="14" spellcheck="false" aria-label="spec" value=${text} onInput=${(e) => setText(e.target.value)}></textarea></div>
    <div class="row"><button class="act danger" disabled=${text === spec.text} onClick=${() => act("Update the service to this spec?", "update", { text })}>Update</button>
      <button class="act danger" disabled=${!spec.before} onClick=${() => act("Go back to the spec before the last update?", "update",
        { text: spec.before })}>Roll back</button>
      <button class="act" onClick=${show}>Read it again</button></div></section>`;
}

/** Tenants and their keys: creates tenants and keys, revokes keys, suspends tenants. */
export function Keys({ act }) {
  const [found, setFound] = useState(null);
  const [made, setMade] = useState(null);
  const [name, setName] = useState("");
  const [trouble, say] = useState("");
  const show = () => tenants().then(setFound, (error) => say(error.message));
  const then = (done) => { setMade(done.key ? done : null); show(); };
  if (!found) return html`<section><h2>Keys</h2><button class="act" onClick=${show}>Show tenants and keys</button>
    ${trouble && html`<p class="bad" role="alert">${trouble}</p>`}</section>`;
  const create = (event) => {
    event.preventDefault();
    act(`Create the tenant ${name.trim()}, with a key?`, "tenant_create", { name: name.trim() }, then);
  };
  return html`<section><h2>Keys</h2>
    ${made && html`<p role="status">The key of ${made.name}, which is not shown again: <code>${made.key}</code></p>`}
    <div class="scroll" tabindex="0"><table><thead><tr><th>tenant</th><th>keys</th><th></th></tr></thead>
    <tbody>${found.map((tenant) => html`<tr key=${tenant.name} class=${tenant.is_suspended ? "warn" : ""}>
      <td>${tenant.name}${tenant.is_operator ? " (operator)" : ""}${tenant.is_suspended ? ` – suspended: ${tenant.suspension || "no reason given"}` : ""}</td>
      <td>${tenant.keys.map((key) => html`<div class="row"><code>${key.id}</code>
        <span class="quiet">${key.expires_at ? `until ${new Date(1000 * key.expires_at).toLocaleString("en-GB")}` : ""}</span>
        <button class="act danger" aria-label="revoke ${key.id}" onClick=${() => act(`Revoke the key ${key.id} of ${tenant.name}? Requests with it are refused at once.`,
          "tenant_revoke", { name: tenant.name, key: key.id }, then)}>revoke</button></div>`)}</td>
      <td><button class="act" aria-label="new key of ${tenant.name}" onClick=${() => act(`Make a new key for ${tenant.name}? Its other keys end in an hour.`,
          "tenant_rotate", { name: tenant.name, grace_s: 3600 }, then)}>new key</button>
        <button class="act danger" aria-label="${tenant.is_suspended ? "resume" : "suspend"} ${tenant.name}" onClick=${() => act(
          tenant.is_suspended ? `Serve ${tenant.name} again?` : `Suspend ${tenant.name}? Its requests are refused.`, "tenant_change",
          { name: tenant.name, is_suspended: !tenant.is_suspended }, then, tenant.is_suspended ? "" : "suspension")}>${tenant.is_suspended ? "resume" : "suspend"}</button></td></tr>`)}
    </tbody></table></div>
    <form class="find" onSubmit=${create}><input value=${name} onInput=${(e) => setName(e.target.value)} placeholder="name of a new tenant"
      aria-label="name of a new tenant" required /><button class="act">Create</button></form></section>`;
}

export function Chat({ facts }) {
  const names = Object.entries(facts.models).filter(([, m]) => m.tokens_s || m.first_tokens || m.generates).map(([n]) => n);
  const all = names.length ? names : Object.keys(facts.models);
  const [said, say] = useState("");
  const [isBusy, setBusy] = useState(false);
  const form = useRef(null);
  const send = async (event) => {
    event.preventDefault();
    const given = new FormData(form.current);
    const headers = { "content-type": "application/json" };
    if (given.get("key")) headers.authorization = `Bearer ${given.get("key")}`;
    const body = { model: given.get("model"), stream: true, messages: [{ role: "user", content: given.get("text") }] };
    setBusy(true);
    let text = "";
    try {
      const answer = await fetch("/chat", { method: "POST", headers, body: JSON.stringify(body) });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        rest += part.value;
        if (!answer.ok) continue;
        const events = rest.split("\n\n");
        rest = events.pop();
        for (const each of events) {
          const [, data] = each.match(/^data: (.*)$/m) || ["", ""];  // an event may have an id, too
          if (!data.startsWith("{")) continue;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new Error(chunk.error.message);
          text += (chunk.choices[0] && chunk.choices[0].delta.content) || "";
          say(text);
        }
      }
      if (!answer.ok) {
        const { error } = JSON.parse(rest);
        throw new Error(error.message || error);
      }
    } catch (error) {
      say(`${text}\n[${error.message}]`);
    } finally {
      setBusy(false);
    }
  };
  return html`<section><h2>Chat</h2><form class="form" ref=${form} onSubmit=${send}>
    <select name="model" aria-label="model">${all.map((n) => html`<option value=${n}>${n}</option>`)}</select>
    <textarea name="text" rows="2" aria-label="message" required>Name the three primary colors.</textarea>
    <input name="key" type="password" placeholder="API key, if the gateways require one" aria-label="API key" autocomplete="off" />
    <button disabled=${isBusy}>${isBusy ? "…" : "Send"}</button></form><p class="said" aria-live="polite">${said}</p></section>`;
}
