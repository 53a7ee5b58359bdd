"""Observer: collects the reports of a service's processes, and derives the facts."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from statistics import median

from msgspec.structs import replace

from multiworld.serve.controller import answers
from multiworld.serve.controller.fleet.decision_log import DecisionLog
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.observe.bottlenecks import bottleneck_of
from multiworld.serve.controller.observe.facts import (
    Facts,
    GatewayFacts,
    ModelFacts,
    Point,
    ReplicaFacts,
    Series,
    Spread,
    StageFacts,
    StreamFacts,
    TenantFacts,
)
from multiworld.serve.controller.observe.paces import Paces, Work
from multiworld.serve.controller.observe.rates import Label, Window
from multiworld.serve.controller.observe.troubles import troubles_of
from multiworld.serve.wire.control_messages import (
    Counted,
    GatewayReport,
    ModelLoad,
    Reports,
    TenantLoad,
    WorkerReport,
    summed,
)

EVENTS = 200  # maximum number of latest events in the facts
CHAINS = 100  # maximum number of a model's chains in the facts
POINTS = 300  # maximum number of points of a model's load, two seconds apart
SHARES = 0.5, 0.99
GOOD = "200"  # status of an answer without an error
FAILED = "500"  # statuses from here on are failures of the service


class Observer:
    """Keeps the last reports of all processes; derives rates and facts from them."""

    def __init__(
        self,
        history: History,
        journal: DecisionLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history, self._journal, self._clock = history, journal, clock
        self.paces, self._window = Paces(), Window()
        self._reports = Reports()
        self._known: Set[str] = frozenset()  # processes that have reported
        self._counts: Mapping[Label, float] = {}
        # By process: CPU seconds so far, and when they were reported.
        self._cpu: dict[str, tuple[float, float]] = {}
        self._cores: dict[str, float] = {}
        self._series: dict[str, deque[Point]] = {}
        # Start times of the streams that were shown last, by gateway and number.
        self._began_at: dict[str, float] = {}

    def seen(
        self,
        reports: Reports,
        counted: tuple[Counted, ...],  # sums since the service started
        posts: Mapping[str, tuple[str, str, int]],  # model, version and stage
        loading: Sequence[str] = (),  # replicas that are not ready yet
        adopted: Container[str] = (),  # processes of an earlier controller
    ) -> None:
        now = self._clock()
        self._reports = reports
        heard = reports.workers.keys() | reports.gateways.keys()
        if any(name in adopted for name in heard - self._known):
            # Its counts since its start are new here, but nothing has grown.
            self._window.clear()
        self._known = heard | {name for name in self._known if name in adopted}
        self._counts = {(kind, labels): value for kind, labels, value in counted}
        self._window.seen(self._counts, now)
        self._use(now)
        before = self.paces.slow
        work = {
            name: _work_of(report, posts[name])
            for name, report in reports.workers.items()
            if name in posts
        }
        self.paces.seen(work, now, loading)
        self._tell(before)
        self._draw(posts)

    @property
    def series(self) -> Series:
        """The load of each model in the last ten minutes."""
        return Series({name: tuple(each) for name, each in self._series.items()})

    def _draw(self, posts: Mapping[str, tuple[str, str, int]]) -> None:
        fullest = dict.fromkeys((model for model, _, _ in posts.values()), 0.0)
        for name, report in self._reports.workers.items():
            if name in posts:
                model = posts[name][0]
                fullest[model] = max(fullest[model], report.kv_usage)
        for name in self._series.keys() - fullest.keys():
            del self._series[name]
        answered = self._window.rates("requests")
        tokens = self._window.rates("stage_tokens")
        in_flight = self._in_flight()
        for name, kv_usage in fullest.items():
            answers_s = self._spread("request_buckets", name)
            first_s = self._spread("first_token_buckets", name)
            point = Point(
                time.time(),
                sum(rate for of, rate in answered.items() if of[0] == name),
                sum(rate for of, rate in tokens.items() if of[0] == name),
                in_flight[name],
                answers_s.p99 if answers_s else 0.0,
                first_s.p99 if first_s else 0.0,
                kv_usage,
                self._prefix_hits(name) or 0.0,
            )
            self._series.setdefault(name, deque(maxlen=POINTS)).append(point)

    def _in_flight(self) -> Counter[str]:
        """Return the attempts at replicas of stage 0, by model, draining ones too."""
        found: Counter[str] = Counter()
        for gateway in self._reports.gateways.values():
            for replica, attempts in gateway.load.items():
                model, _, stage = replica.rpartition("/")[0].rpartition("/")
                if stage == "0":
                    found[model] += attempts
        return found

    def _use(self, now: float) -> None:
        used = {name: each.cpu_s for name, each in self._reports.workers.items()}
        used |= {name: each.cpu_s for name, each in self._reports.gateways.items()}
        for name in self._cpu.keys() - used.keys():
            del self._cpu[name]
            self._cores.pop(name, None)
        for name, cpu_s in used.items():
            before_s, at = self._cpu.get(name, (cpu_s, now))
            if now > at:
                self._cores[name] = max(0.0, cpu_s - before_s) / (now - at)
            self._cpu[name] = cpu_s, now

    def _tell(self, before: Mapping[str, str]) -> None:
        slow = self.paces.slow
        for name in slow.keys() - before.keys():
            self._history.say("slow", f"{name} is slow: {slow[name]}", name)
        for name in (before.keys() - slow.keys()) & self._reports.workers.keys():
            self._history.say("slow", f"{name} is no longer slow", name)

    # The facts.

    def facts(
        self,
        status: answers.StatusAnswer,
        nodes: list[answers.NodeShown],
        handed_over: int,
        budgets: Mapping[str, Mapping[str, tuple[int, int]]],
        disk: tuple[int, int] = (0, 0),
        neighbour: str = "",
    ) -> Facts:
        """Return all facts, as of the last reports."""
        gateways = self._reports.gateways
        totals: Counter[str] = Counter()
        for (kind, labels), value in self._counts.items():
            if kind in ("stream_events", "router_events"):
                totals[f"{kind} {labels[0]}"] += int(value)
        streams, requests = "stream_events", "router_events"
        replicas = dict(self._replicas(status, gateways))
        facts = Facts(
            app=status.app,
            url=status.url,
            at=time.time(),
            is_ready=status.is_ready,
            controller=status.controller,
            trouble=status.trouble,
            models=dict(self._models(status, gateways, replicas)),
            replicas=replicas,
            gateways=dict(self._gateways(status, gateways)),
            streams=self._streams(gateways),
            tenants=self._tenants(budgets),
            nodes={node.name: node for node in nodes},
            events=tuple(self._history.since(self._history.last_number - EVENTS)),
            thoughts=tuple(self._journal.reasons()),
            tokens=totals[f"{streams} tokens"],
            replayed=totals[f"{streams} replayed"] + totals[f"{requests} replayed"],
            moved=totals[f"{streams} moved"],
            cut=totals[f"{streams} cut"],
            handed_over=handed_over,
            unplaced=status.unplaced,
            failing={
                f"{each.model}, stage {each.stage}": each.cause
                for each in status.failing
            },
            busy=self._busy(replicas),
            disk=disk,
            neighbour=neighbour,
            slower=self._slower(status),
        )
        return replace(facts, troubles=tuple(troubles_of(facts)))

    def _busy(self, replicas: Mapping[str, ReplicaFacts]) -> dict[str, float]:
        """Return the used share of each machine's cores, as its replicas measure it."""
        found: dict[str, list[float]] = {}
        for name, report in self._reports.workers.items():
            if name in replicas and report.machine_busy >= 0:
                found.setdefault(replicas[name].node, []).append(report.machine_busy)
        return {node: round(median(shares), 2) for node, shares in found.items()}

    def _slower(self, status: answers.StatusAnswer) -> dict[str, str]:
        names = {(p.model, p.version, p.stage): p.stage_name for p in status.processes}
        return {
            f"{stage[0]}, stage {names[stage]}": why
            for stage, why in self.paces.slower.items()
            if stage in names
        }

    def _models(
        self,
        status: answers.StatusAnswer,
        gateways: Mapping[str, GatewayReport],
        replicas: Mapping[str, ReplicaFacts],
    ) -> Iterator[tuple[str, ModelFacts]]:
        answered = self._window.rates("requests")
        tokens = self._window.rates("stage_tokens")
        held = summed(*(g.models for g in gateways.values()))
        for name, wanted in status.wanted.models.items():
            version = status.active.get(name, wanted.version)
            posts = [p for p in status.processes if p.model == name]
            rates = {
                labels[1]: r for labels, r in answered.items() if labels[0] == name
            }
            stages = [
                StageFacts(
                    next((p.stage_name for p in posts if p.stage == k), str(k)),
                    count,
                    tuple(p.name for p in posts if p.stage == k),
                )
                for k, count in enumerate(wanted.replicas)
            ]
            loads = [
                g.load.get(r, 0) for g in gateways.values() for r in stages[0].replicas
            ]
            waiting = sum(g.waiting.get(name, 0) for g in gateways.values())
            yield (
                name,
                ModelFacts(
                    version=version,
                    stages=tuple(stages),
                    requests_s=rates.get(GOOD, 0.0),
                    failures_s=sum(r for s, r in rates.items() if s != GOOD),
                    failed_s={s: r for s, r in rates.items() if s >= FAILED},
                    tokens_s=sum(r for la, r in tokens.items() if la[0] == name),
                    in_flight=sum(loads),
                    waiting=waiting,
                    oldest_s=round(
                        max(
                            (g.oldest_s.get(name, 0.0) for g in gateways.values()),
                            default=0.0,
                        ),
                        1,
                    ),
                    kv_usage=max(
                        (r.kv_usage for r in replicas.values() if r.model == name),
                        default=0.0,
                    ),
                    prefix_hits=self._prefix_hits(name),
                    chains=_chains(stages, gateways),
                    bottleneck=bottleneck_of(
                        stages, replicas, waiting, held.get(name, ModelLoad())
                    ),
                    answers=self._spread("request_buckets", name),
                    queue=self._spread("queue_buckets", name),
                    first_tokens=self._spread("first_token_buckets", name),
                    between_tokens=self._spread("output_token_buckets", name),
                ),
            )

    def _prefix_hits(self, model: str) -> float | None:
        hits, asked = (
            sum(rate for of, rate in self._window.rates(kind).items() if of[0] == model)
            for kind in ("stage_prefix_cache_hits", "stage_prefix_cache_queries")
        )
        return hits / asked if asked else None

    def _spread(self, kind: str, model: str) -> Spread | None:
        found = self._window.quantiles(kind, model, SHARES)
        return Spread(*found) if found else None

    def _replicas(
        self, status: answers.StatusAnswer, gateways: Mapping[str, GatewayReport]
    ) -> Iterator[tuple[str, ReplicaFacts]]:
        slow, steps_s = self.paces.slow, self.paces.steps_s
        silent = {name for g in gateways.values() for name in g.silent}
        for process in status.processes:
            if process.is_gateway:
                continue
            name = process.name
            report = self._reports.workers.get(name, WorkerReport())
            yield (
                name,
                ReplicaFacts(
                    model=process.model,
                    version=process.version,
                    stage=process.stage,
                    phase=process.phase.value,
                    since_s=round(process.since_s),
                    pid=process.pid,
                    node=process.node,
                    load=sum(g.load.get(name, 0) for g in gateways.values()),
                    queued=report.queued,
                    computing=report.computing,
                    kv_usage=report.kv_usage,
                    memory_bytes=report.memory_bytes,
                    booked_memory_bytes=process.booked_memory_bytes,
                    cores=round(self._cores.get(name, 0.0), 2),
                    step_s=steps_s.get(name),
                    busy=round(self.paces.busy.get(name, 0.0), 2),
                    slow=slow.get(name, ""),
                    is_silent=name in silent,
                    next=report.downstream,
                    note=report.phase,
                    log=process.log,
                ),
            )

    def _gateways(
        self, status: answers.StatusAnswer, reports: Mapping[str, GatewayReport]
    ) -> Iterator[tuple[str, GatewayFacts]]:
        for process in status.processes:
            if process.is_gateway:
                report = reports.get(process.name, GatewayReport())
                yield (
                    process.name,
                    GatewayFacts(
                        phase=process.phase.value,
                        since_s=round(process.since_s),
                        pid=process.pid,
                        in_flight=report.in_flight,
                        waiting=sum(report.waiting.values()),
                        cores=round(self._cores.get(process.name, 0.0), 2),
                        log=process.log,
                    ),
                )

    def _streams(self, gateways: Mapping[str, GatewayReport]) -> dict[str, StreamFacts]:
        found: dict[str, StreamFacts] = {}
        for gateway, report in gateways.items():
            for each in report.streams:
                key = f"{gateway}/{each.number}"
                began_at = self._began_at.get(key, round(time.time() - each.age_s, 1))
                found[key] = StreamFacts(
                    request=each.request,
                    gateway=gateway,
                    tenant=each.tenant,
                    model=each.model,
                    prompt=each.prompt,
                    made=each.made,
                    began_at=began_at,
                    phase=each.phase,
                    chain=each.chain,
                    attempt=each.attempt,
                    losses=each.losses,
                    longest_s=each.longest_s,
                )
        self._began_at = {key: each.began_at for key, each in found.items()}
        return found

    def _tenants(
        self, budgets: Mapping[str, Mapping[str, tuple[int, int]]]
    ) -> dict[str, TenantFacts]:
        asked: Counter[str] = Counter()
        for labels, rate in self._window.rates("tenant_requests").items():
            asked[labels[0]] += rate  # type: ignore[assignment]
        refused_s: dict[str, dict[str, float]] = {}
        for (tenant, why), rate in self._window.rates("refused").items():
            refused_s.setdefault(tenant, {})[why] = rate
        loads = summed(*(g.tenants for g in self._reports.gateways.values()))
        refused: dict[str, dict[str, float]] = {}
        for (kind, labels), value in self._counts.items():
            if kind == "refused":
                refused.setdefault(labels[0], {})[labels[1]] = value
        return {
            name: TenantFacts(
                requests_s=asked[name],
                in_flight=(load := loads.get(name, TenantLoad())).in_flight,
                waiting=load.waiting,
                structured=load.structured,
                prompt_tokens=load.prompt_tokens,
                refused_s=refused_s.get(name, {}),
                refused=refused.get(name, {}),
                budgets=dict(budgets.get(name, {})),
            )
            for name in sorted(
                asked.keys() | refused.keys() | budgets.keys() | loads.keys()
            )
        }


def _chains(
    stages: Sequence[StageFacts], gateways: Mapping[str, GatewayReport]
) -> tuple[tuple[tuple[str, ...], int], ...]:
    """Return a model's chains with most streams, summed over all gateways."""
    first = set(stages[0].replicas)
    counts: Counter[tuple[str, ...]] = Counter()
    for report in gateways.values():
        for chain, count in report.chains:
            if chain[0] in first:
                counts[chain] += count
    return tuple(counts.most_common(CHAINS))


def _work_of(report: WorkerReport, post: tuple[str, str, int]) -> Work:
    steps = report.counts.get("steps", 0) or report.counts.get("batches", 0)
    rows = report.counts.get("rows", 0)
    return Work(
        post,
        steps,
        rows,
        report.computed_s,
        report.cpu_s,
        report.computing_s,
        report.machine_busy,
    )
