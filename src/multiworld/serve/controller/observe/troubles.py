"""Sentences about what is wrong with a service now. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from multiworld.config import MIB
from multiworld.serve.controller.fleet.entries import HistoryEntry
from multiworld.serve.controller.observe.facts import Facts, ModelFacts

# Losses at a stage, or of gateways, are reported if at least ``MANY`` happened within
# ``RECENT_S`` seconds, the last one less than ``FRESH_S`` ago. After ``NOW_S``, they
# are reported last, in the past tense.
RECENT_S, MANY, FRESH_S, NOW_S = 120.0, 2, 60.0, 30.0
FAILING_S = 0.05  # failed requests per second that are mentioned
LOSSES = ("lost", "outgrown")
LONG_S = 5.0  # seconds after which a wait for a first token or an answer is long
# A tenant is named if it has more than this share of the requests in flight, or more
# than this share of the waiting prompt tokens and more than ``LONG_PROMPTS`` of them.
MOST, LONG_PROMPTS = 0.5, 1000
FEW = 4  # maximum requests in flight for which no tenant is named
# A disk is full if less than this share of it, or fewer than these bytes, are free.
FULL, FULL_BYTES = 0.02, 64 * MIB
SATURATED = 0.95  # used share of a machine's cores from which none counts as free
OTHERS = 0.3  # share of cores above which other programs' use is mentioned
# Seconds for which a trouble must last until its start is an event, and be absent until
# its end is one.
BEGINS_S, ENDS_S = 5.0, 15.0


def troubles_of(facts: Facts) -> Iterator[str]:
    """Yield what is wrong, the worst first."""
    if facts.trouble:
        yield facts.trouble
    yield from _of_disk(facts).values()
    for name, why in facts.failing.items():
        yield f"{name} keeps failing: {why}"
    yield from _of_losses(facts, is_past=False)
    for name, why in facts.unplaced.items():
        yield f"{name} cannot be placed: {why}"
    for name, replica in facts.replicas.items():
        if replica.is_silent:
            yield f"{name} is silent: it hangs, or a network partition separates it"
    if not facts.is_ready:
        yield from _of_lacks(facts)
    yield from _of_tenants(facts).values()
    for name, model in facts.models.items():
        yield from _of_load(name, model)
    for name, replica in facts.replicas.items():
        if replica.slow:
            yield f"{name} is slow: {replica.slow}"
    for name, why in facts.slower.items():
        yield f"all replicas of {name} are slower than before: {why}"
    yield from _of_machines(facts).values()
    for name, tenant in facts.tenants.items():
        who = f"tenant {name} is" if name else "requests without a valid key are"
        for why, each in tenant.refused_s.items():
            yield f"{who} refused {each:.1f} times a second: {why}"
    yield from _of_losses(facts, is_past=True)


def _of_disk(facts: Facts) -> dict[str, str]:
    free, total = facts.disk
    if not total or (free >= FULL * total and free >= min(FULL_BYTES, total // 4)):
        return {}
    text = (
        f"the disk of the service's state and logs is full: {free // MIB} of "
        f"{total // MIB} MiB are free; records, usage and logs may be lost"
    )
    return {"the disk is full": text}


def _of_losses(facts: Facts, *, is_past: bool) -> Iterator[str]:
    groups: dict[str, list[HistoryEntry]] = {}
    for event in facts.events:
        if event.kind in LOSSES and facts.at - event.at <= RECENT_S:
            groups.setdefault(_group_of(event.name, facts), []).append(event)
    for group, found in groups.items():
        ago_s = max(0.0, facts.at - found[-1].at)
        if len(found) >= MANY and ago_s < FRESH_S and (ago_s > NOW_S) is is_past:
            yield (
                f"{group} {'were' if is_past else 'are'} lost again and again: "
                f"{len(found)} in two minutes, the last {ago_s:.0f} s ago: "
                f"{found[-1].text}"
            )


def _group_of(process: str, facts: Facts) -> str:
    model, _, rest = process.rpartition("/")[0].rpartition("/")
    stages = facts.models[model].stages if model in facts.models else ()
    if rest.isdigit() and int(rest) < len(stages):
        return f"replicas of {model}, stage {stages[int(rest)].name},"
    return "gateways" if process.startswith("gateway/") else "processes"


def _of_lacks(facts: Facts) -> Iterator[str]:
    for name, model in facts.models.items():
        for stage in model.stages:
            ready = sum(
                facts.replicas[each].phase == "ready"
                for each in stage.replicas
                if each in facts.replicas
            )
            if ready < stage.wanted:
                yield f"{name}, stage {stage.name}: {ready} of {stage.wanted} are ready"
    ready = sum(each.phase == "ready" for each in facts.gateways.values())
    if ready < len(facts.gateways):
        count = len(facts.gateways)
        yield f"{count - ready} of {count} gateways are not ready"


def _of_load(name: str, model: ModelFacts) -> Iterator[str]:
    if model.bottleneck and (model.waiting or model.oldest_s > LONG_S):
        yield f"{name}: {model.bottleneck}"
    if model.oldest_s > LONG_S:
        yield (
            f"{name}: the oldest request without a first token or an answer has waited "
            f"{model.oldest_s:.0f} s"
        )
    for status, rate in model.failed_s.items():
        if rate > FAILING_S:
            yield f"{name}: {rate:.1f} requests a second fail with status {status}"


def _of_tenants(facts: Facts) -> dict[str, str]:
    """Describe the tenants with most of the load, if requests wait; by title."""
    if len(facts.tenants) < 2:
        return {}
    waiting = sum(each.waiting for each in facts.tenants.values())
    in_flight = sum(each.in_flight for each in facts.tenants.values())
    tokens = sum(each.prompt_tokens for each in facts.tenants.values())
    if not waiting or in_flight <= FEW:
        return {}
    found = {}
    for name, tenant in facts.tenants.items():
        has_most = tenant.in_flight > MOST * in_flight
        if has_most or tenant.prompt_tokens > max(MOST * tokens, LONG_PROMPTS):
            parts = [f"{tenant.in_flight} of {in_flight} requests in flight"]
            if tenant.structured:
                parts.append(f"{tenant.structured} of them with structured output")
            if tenant.waiting:
                parts.append(
                    f"{tenant.waiting} wait for a first token or an answer, with "
                    f"{tenant.prompt_tokens:,} prompt tokens"
                )
            limit = "max-parallel-requests" if has_most else "tpm-limit"
            what = "; ".join(parts)
            found[f"tenant {name or 'without a key'} has most of the load"] = (
                f"tenant {name} has {what}: `multiworld tenants set {name} "
                f"--{limit} N` limits it"
                if name
                else f"clients without a key have {what}: with `authentication: keys`, "
                "each tenant can be limited"
            )
    return found


def _of_machines(facts: Facts) -> dict[str, str]:
    """Describe machines whose cores other programs use; by title."""
    found = {}
    for name, busy in facts.busy.items():
        node = facts.nodes.get(name)
        if node is None or busy < SATURATED:
            continue
        ours = sum(r.cores for r in facts.replicas.values() if r.node == name)
        ours += sum(gateway.cores for gateway in facts.gateways.values())
        others = busy * node.cpus - ours
        if others > OTHERS * node.cpus:
            is_here = len(facts.nodes) == 1  # the controller sees its own machine only
            is_known = bool(facts.neighbour) and is_here
            who = f", the most by {facts.neighbour}" if is_known else ""
            found[f"machine {name} has no free core"] = (
                f"machine {name} has no free core: {busy:.0%} of {node.cpus:g} "
                f"cores are used, {ours:.1f} by this service's replicas and gateways, "
                f"and {others:.1f} by other processes{who}"
            )
    return found


@dataclass(slots=True)
class _Known:
    """A trouble that was seen lately; monotonic times."""

    began_at: float
    last_at: float = 0.0
    is_reported: bool = False


class TroubleLog:
    """Reports the start and the end of troubles that have no other events. Pure."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def seen(self, facts: Facts, now: float) -> Iterator[str]:
        """Yield events, in words; ``now``: monotonic time."""
        found = _of_disk(facts) | _of_tenants(facts) | _of_machines(facts)
        for title, text in found.items():
            known = self._known.setdefault(title, _Known(now))
            known.last_at = now
            if not known.is_reported and now - known.began_at >= BEGINS_S:
                known.is_reported = True
                yield text
        for title, known in list(self._known.items()):
            if now - known.last_at >= ENDS_S:
                del self._known[title]
                if known.is_reported:
                    took_s = known.last_at - known.began_at
                    yield f"ended after {took_s:.0f} s: {title}"
