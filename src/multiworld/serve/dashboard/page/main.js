// The page: its selections, its dialogs, and its panels.
import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { ask, bytes, clock, follow, seconds } from "./facts.js";
import {
  Alerts, Chat, Events, Gateways, Keys, Machines, Model, Numbers, Spec, stateOf, stateOfStream, Streams, Tenants, Thoughts,
} from "./panels.js";

const POINTS = 300;
const POINT_S = 2;

function Page() {
  const [facts, setFacts] = useState(null);
  const [isCut, setCut] = useState(false);
  const [series, setSeries] = useState({});
  const [opened, open] = useState("");
  const [asked, setAsked] = useState(null);
  const [kind, choose] = useState("");
  const [request, look] = useState("");
  const [trouble, setTrouble] = useState("");

  useEffect(() => {
    fetch("/series").then((a) => a.json()).then((s) => setSeries(s.models)).catch(() => {});
    follow((found, isLost) => {
      setCut(Boolean(isLost));
      if (!found.app) {
        setTrouble((found.troubles || []).join("; ")); // no controller has answered yet
        return;
      }
      setFacts(found);
      setSeries((before) => extended(before, found));
    });
  }, []);

  if (!facts) return html`<p class="quiet">${isCut ? "The page's server does not answer." : trouble || "Loading …"}</p>`;
  const act = (text, operation, body, then, field) => setAsked({ text, operation, body, then, field });
  const process = facts.replicas[opened] || facts.gateways[opened];
  const isOld = isCut || facts.is_old;
  return html`<main class=${isOld ? "old" : ""}>
    <header><h1>${facts.app}</h1>
      <strong class=${facts.is_ready && !isOld ? "good" : "bad"}>${isOld ? `? as of ${clock(facts.at)}` : facts.is_ready ? "✓ ready" : "✕ not ready"}</strong>
      <a href=${facts.url}>${facts.url}</a></header>
    <section><${Numbers} facts=${facts} /></section>
    <${Alerts} facts=${facts} isCut=${isCut} />
    ${Object.entries(facts.models).map(([name, model]) => html`<${Model} key=${name} name=${name} model=${model}
      facts=${facts} series=${series[name]} open=${open} act=${act} />`)}
    <${Streams} facts=${facts} look=${look} act=${act} />
    <${Tenants} facts=${facts} />
    <${Events} facts=${facts} kind=${kind} choose=${choose} />
    <div class="two"><${Gateways} facts=${facts} open=${open} act=${act} /><${Machines} facts=${facts} /><${Thoughts} facts=${facts} /><${Chat} facts=${facts} /><${Keys} act=${act} /><${Spec} facts=${facts} act=${act} /></div>
    ${request && html`<${Way} request=${request} facts=${facts} act=${act} close=${() => look("")} />`}
    ${process && html`<${Details} name=${opened} process=${process} facts=${facts} act=${act} close=${() => open("")} />`}
    ${asked && html`<${Confirm} asked=${asked} close=${() => setAsked(null)} />`}
  </main>`;
}

/** Add the current load to the series if the last point is old enough. */
function extended(series, facts) {
  const found = { ...series };
  for (const [name, model] of Object.entries(facts.models)) {
    const points = found[name] || [];
    if (points.length && facts.at - points[points.length - 1][0] < POINT_S) continue;
    const point = [facts.at, model.requests_s + model.failures_s, model.tokens_s, model.in_flight,
      model.answers ? model.answers.p99 : 0, model.first_tokens ? model.first_tokens.p99 : 0,
      model.kv_usage, model.prefix_hits || 0];
    found[name] = [...points, point].slice(-POINTS);
  }
  return found;
}

/** A modal dialog, which takes the keyboard focus and closes with Escape. */
function Dialog({ close, children, label }) {
  const place = useRef(null);
  useEffect(() => { place.current.showModal(); }, []);
  return html`<dialog ref=${place} aria-label=${label} onClose=${close}>${children}</dialog>`;
}

function Confirm({ asked, close }) {
  const [said, say] = useState("");
  const [words, setWords] = useState("");
  const isBusy = useRef(false);
  const [, draw] = useState(0);
  const go = async () => {
    if (isBusy.current) return;  // a second click, before the first is answered
    isBusy.current = true;
    draw(1);
    try {
      const body = asked.field ? { ...asked.body, [asked.field]: words } : asked.body;
      const done = await ask(asked.operation, body);
      if (asked.then) asked.then(done);
      close();
    } catch (error) {
      say(error.message);
    }
    isBusy.current = false;
    draw(0);
  };
  return html`<${Dialog} close=${close} label="confirm"><p>${asked.text}</p>
    ${asked.field && html`<p><input value=${words} onInput=${(e) => setWords(e.target.value)} placeholder="reason that its clients see"
      aria-label="reason" maxlength="500" /></p>`}
    ${said && html`<p class="bad" role="alert">${said}</p>`}
    <div class="row"><button class="act danger" onClick=${go} disabled=${isBusy.current}>Do it</button><button class="act" onClick=${close} autofocus>Leave it</button></div></${Dialog}>`;
}

function Details({ name, process, facts, act, close }) {
  const [log, setLog] = useState("");
  const show = () => fetch(`/logs/${name}`).then((a) => a.text()).then(setLog);
  useEffect(() => { show(); }, [name]);
  const model = facts.models[process.model];
  const stage = model && model.stages[process.stage].name;
  const lines = [["phase", process.phase], ["process", process.pid]];
  if (model) {
    const [, , words] = stateOf(process);
    lines.splice(0, 1, ["state", words]);
    if (process.slow) lines.push(["slow", process.slow]);
    lines.push(["machine", process.node], ["in work", `${process.load}, of these ${process.queued} queued and ${process.computing} computed`],
      ["step", seconds(process.step_s)], ["KV memory", `${Math.round(100 * process.kv_usage)} %`],
      ["memory", `${bytes(process.memory_bytes)} of ${bytes(process.booked_memory_bytes)} booked`], ["next", process.next.join(", ") || "–"]);
  }
  lines.push(["cores", process.cores.toFixed(2)], ["log", process.log]);
  const chaos = (action) => act(`${action} a replica of ${process.model}/${stage}? Its streams continue elsewhere.`, "chaos",
    { action, model: process.model, stage });
  return html`<${Dialog} close=${close} label=${name}><h2>${name}</h2>
    <dl class="facts">${lines.map(([what, value]) => html`<dt>${what}</dt><dd>${value}</dd>`)}</dl>
    <pre tabindex="0">${log || "its log is empty"}</pre>
    <div class="row"><button class="act" onClick=${show}>Read the log again</button>
      <button class="act" onClick=${() => act(`Replace ${name}? It ends when its replacement is ready.`, "drain", { name })}>Drain</button>
      ${model && html`<button class="act danger" onClick=${() => chaos("kill")}>Kill a replica of this stage</button>
        <button class="act danger" onClick=${() => chaos("stop")}>Stop a replica of this stage</button>`}
      <button class="act" onClick=${close}>Close</button></div></${Dialog}>`;
}

/** All about a request: its streams, and its log entries. */
function Way({ request, facts, act, close }) {
  const [entries, setEntries] = useState(null);
  const show = () => fetch(`/requests/${encodeURIComponent(request)}`).then((a) => a.json()).then(setEntries);
  useEffect(() => { show(); }, [request]);
  const mine = Object.values(facts.streams || {}).filter((s) => s.request === request);
  return html`<${Dialog} close=${close} label="request ${request}"><h2>Request ${request}</h2>
    ${mine.map((s) => html`<dl class="facts"><dt>state</dt><dd>${stateOfStream(s)}, at ${s.gateway}</dd>
      <dt>tokens</dt><dd>${s.made}, after a prompt of ${s.prompt}</dd><dt>chain</dt><dd>${s.chain.join(" → ") || "none"}</dd>
      <dt>longest pause</dt><dd>${s.longest_s ? seconds(s.longest_s) : "–"}</dd><dt>tenant</dt><dd>${s.tenant || "–"}</dd></dl>`)}
    ${!mine.length && html`<p class="quiet">It is not running, or not among the streams shown.</p>`}
    ${entries && (entries.length ? html`<div class="scroll" tabindex="0"><table class="events"><tbody>${entries.map((e) =>
      html`<tr><td>${e.at ? clock(e.at) : ""}</td><td>${e.process}</td><td><span class="line">${e.text}</span></td></tr>`)}</tbody></table></div>`
      : html`<p class="quiet">No log entry names it. Successful requests are logged only with <code>gateway.access_log</code>.</p>`)}
    <div class="row"><button class="act" onClick=${show}>Read the logs again</button>
      ${mine.length > 0 && html`<button class="act danger" onClick=${() => act(`Cancel request ${request}? Its client gets an error.`,
        "cancel", { request })}>Cancel it</button>`}
      <button class="act" onClick=${close}>Close</button></div></${Dialog}>`;
}

render(html`<${Page} />`, document.getElementById("page"));
