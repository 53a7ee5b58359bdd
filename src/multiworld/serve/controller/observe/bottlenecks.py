"""Bottlenecks of models. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from multiworld.serve.controller.observe.facts import ReplicaFacts, StageFacts
from multiworld.serve.wire.control_messages import ModelLoad

BUSY = 0.85  # minimum share of time spent computing that makes a stage a bottleneck
FULL = 0.95  # minimum share of KV memory in use that counts as full
MOST = 0.25  # share of requests whose grammar is compiled, above which this is a cause
LONG = 500  # mean tokens per waiting prompt from which prompts count as long
READY = "ready"
NO_LOAD = ModelLoad()


def bottleneck_of(
    stages: Sequence[StageFacts],
    replicas: Mapping[str, ReplicaFacts],
    waiting: int,  # requests and streams at gateways
    load: ModelLoad = NO_LOAD,  # of requests without a token
) -> str:
    """Return a model's bottleneck; empty if nothing waits and no stage is busy."""
    ready = [
        [
            replicas[name]
            for name in stage.replicas
            if name in replicas and replicas[name].phase == READY
        ]
        for stage in stages
    ]
    waiting += sum(each.queued for each in ready[0])
    for stage, there in zip(stages, ready, strict=True):
        if stage.wanted and not there:
            return f"stage {stage.name} has no ready replica"
    used = [each.kv_usage for each in ready[0]]
    if waiting and used and min(used) >= FULL:
        return (
            f"the memory for keys and values is full ({min(used):.0%}), with {waiting} "
            "waiting: raise kv_cache_memory_mb, or scale the first stage"
        )
    busy = {
        number: mean(each.busy for each in there)
        for number, there in enumerate(ready)
        if there
    }
    most = max(busy, key=lambda number: busy[number], default=None)
    if most is not None and busy[most] >= BUSY:
        slow = [n for n in stages[most].replicas if n in replicas and replicas[n].slow]
        text = f"stage {stages[most].name} computes {busy[most]:.0%} of the time"
        text += f", with {waiting} waiting" if waiting else ", with nothing waiting yet"
        more = f"; slow: {', '.join(slow)}" if slow else ""
        return f"{text}: scale it, or give its replicas more cores{more}"
    waiting = max(waiting, load.compiling)  # those whose grammar is being compiled
    if waiting:
        return f"{waiting} waiting, and no stage is saturated: {_cause(load)}"
    return ""


def _cause(load: ModelLoad) -> str:
    """Return what holds requests back although no stage is busy."""
    causes = []
    if load.waiting and load.prompt_tokens > LONG * load.waiting:
        causes.append("long prompts hold them back")
    if load.compiling > MOST * load.waiting:
        causes.append("the compilation of grammars holds them back")
    limits = "max_num_seqs, max_ongoing_requests"
    return " and ".join(causes) or f"a limit holds them back ({limits})"
