"""What an operator is told to look at."""

from __future__ import annotations

from typing import Any

import pytest

from multiworld.config import MIB
from multiworld.serve.controller.answers import NodeShown
from multiworld.serve.controller.fleet.entries import HistoryEntry
from multiworld.serve.controller.observe.facts import (
    Facts,
    GatewayFacts,
    ModelFacts,
    ReplicaFacts,
    StageFacts,
    TenantFacts,
)
from multiworld.serve.controller.observe.troubles import TroubleLog, troubles_of

NOW = 1000.0


def replica(**changes: Any) -> ReplicaFacts:
    about: dict[str, Any] = {
        "model": "m",
        "version": "1",
        "stage": 0,
        "phase": "ready",
        "since_s": 1.0,
        "pid": 1,
        "node": "here",
    }
    return ReplicaFacts(**{**about, **changes})


def facts(**changes: Any) -> Facts:
    about: dict[str, Any] = {
        "app": "a",
        "url": "",
        "at": NOW,
        "is_ready": True,
        "controller": 1,
        "trouble": "",
        "models": {
            "m": ModelFacts(version="1", stages=(StageFacts("front", 1, ("m/0/1",)),))
        },
        "replicas": {"m/0/1": replica()},
        "gateways": {"gateway/1": GatewayFacts(phase="ready", since_s=1.0, pid=2)},
        "tenants": {},
        "nodes": {},
        "events": (),
        "thoughts": (),
    }
    return Facts(**{**about, **changes})


def losses(name: str, *ages_s: float) -> tuple[HistoryEntry, ...]:
    return tuple(
        HistoryEntry(n, NOW - age_s, "lost", f"{name}: it ended with SIGKILL", name)
        for n, age_s in enumerate(ages_s)
    )


def model(**changes: Any) -> dict[str, ModelFacts]:
    stages = (StageFacts("front", 2, ("m/0/1",)),)
    return {"m": ModelFacts(version="1", stages=stages, **changes)}


NODE = NodeShown("here", 2.0, 0, (), "", "", 0.0, None, None, 0.0, 0, {}, ())
BUSY_TENANTS = {
    "acme": TenantFacts(in_flight=2, waiting=0),
    "bolt": TenantFacts(in_flight=11, waiting=11, prompt_tokens=19800),
}
STRUCTURED = {
    "acme": TenantFacts(in_flight=2, waiting=1, prompt_tokens=10),
    "crow": TenantFacts(in_flight=8, waiting=4, structured=8, prompt_tokens=4),
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"disk": (5_000 * MIB, 9_000 * MIB)}, ""),
        ({"disk": (MIB, 9_000 * MIB)}, "is full: 1 of 9000 MiB are free"),
        ({"disk": (19 * MIB, 24 * MIB)}, ""),
        ({"disk": (0, 24 * MIB)}, "is full: 0 of 24 MiB"),
        ({"events": losses("gateway/3", 9)}, ""),
        ({"events": losses("gateway/3", 90, 61)}, ""),
        (
            {"events": losses("gateway/3", 20, 9, 3)},
            "gateways are lost again and again: 3 in two minutes, the last 3 s ago: "
            "gateway/3: it ended with SIGKILL",
        ),
        ({"events": losses("m/0/3", 300, 200, 130, 8)}, ""),
        ({"events": losses("m/0/3", 45, 31)}, "stage front, were lost again and again"),
        (
            {"events": losses("m/0/3", 30, 8)},
            "replicas of m, stage front, are lost again and again: 2 in two minutes",
        ),
        ({"is_ready": False, "models": model()}, "m, stage front: 1 of 2 are ready"),
        ({"models": model(oldest_s=0.3, bottleneck="why")}, ""),
        ({"models": model(waiting=1, bottleneck="why")}, "m: why"),
        ({"models": model(oldest_s=43.0)}, "has waited 43 s"),
        ({"models": model(failed_s={"504": 0.01})}, ""),
        (
            {"models": model(failed_s={"504": 1.26})},
            "m: 1.3 requests a second fail with status 504",
        ),
        (
            {"tenants": BUSY_TENANTS},
            "tenant bolt has 11 of 13 requests in flight; 11 wait for a first token or "
            "an answer, with 19,800 prompt tokens: `multiworld tenants set bolt "
            "--max-parallel-requests N` limits it",
        ),
        (
            {"tenants": STRUCTURED},
            "tenant crow has 8 of 10 requests in flight; 8 of them with structured",
        ),
        ({"tenants": {"bolt": BUSY_TENANTS["bolt"]}}, ""),
        (
            {"slower": {"m, stage front": "why"}},
            "all replicas of m, stage front",
        ),
        ({"nodes": {"here": NODE}, "busy": {"here": 0.9}}, ""),
        (
            {"nodes": {"here": NODE}, "busy": {"here": 0.99}},
            "no free core: 99% of 2 cores are used, 0.0 by this service's replicas "
            "and gateways, and 2.0 by other processes",
        ),
        (
            {"nodes": {"here": NODE}, "busy": {"here": 0.99}, "neighbour": "cc (7)"},
            "2.0 by other processes, the most by cc (7)",
        ),
        (
            {
                "nodes": {"here": NODE},
                "busy": {"here": 0.99},
                "replicas": {"m/0/1": replica(cores=1.6)},
            },
            "",
        ),
        (
            {"tenants": {"": TenantFacts(refused_s={"no key": 2.0})}},
            "refused 2.0 times",
        ),
        ({"replicas": {"m/0/1": replica(is_silent=True)}}, "m/0/1 is silent"),
        ({"replicas": {"m/0/1": replica(slow="why")}}, "m/0/1 is slow: why"),
        ({"trouble": "the launcher fails"}, "the launcher fails"),
        ({"failing": {"m, stage 0": "why"}}, "m, stage 0 keeps failing: why"),
    ],
)
def test_trouble_is_named_and_nothing_else(changes: dict[str, Any], words: str) -> None:
    found = list(troubles_of(facts(**changes)))
    if not words:
        assert found == []
        return
    (only,) = found
    assert words in only


def test_worst_comes_first() -> None:
    changed = facts(
        disk=(0, 24 * MIB),
        models=model(oldest_s=43.0),
        replicas={"m/0/1": replica(slow="why")},
    )
    found = list(troubles_of(changed))
    assert [text.split()[0] for text in found] == ["the", "m:", "m/0/1"]


def test_trouble_that_lasts_has_an_event_at_its_begin_and_at_its_end() -> None:
    """One that comes back within seconds is the same; a short one has none."""
    log = TroubleLog()
    bad, good = facts(disk=(0, 24 * MIB), tenants=BUSY_TENANTS), facts()
    said: dict[int, list[str]] = {}
    for now in range(0, 100, 2):
        is_bad = now < 20 or 24 <= now < 50 or now == 80
        if found := list(log.seen(bad if is_bad else good, float(now))):
            said[now] = found
    assert list(said) == [6, 64]
    disk, tenant = said[6]
    assert "is full: 0 of 24 MiB" in disk
    assert "tenant bolt has 11 of 13" in tenant
    assert said[64] == [
        "ended after 48 s: the disk is full",
        "ended after 48 s: tenant bolt has most of the load",
    ]
