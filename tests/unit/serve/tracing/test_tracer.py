"""What the environment asks for, and what is exported."""

from __future__ import annotations

import importlib
import random
import threading
import time

import pytest

from multiworld.errors import ConfigError
from multiworld.serve.tracing import tracer
from multiworld.serve.tracing.spans import Kind, Span
from multiworld.serve.tracing.tracer import Tracer, check, is_wanted, tracer_of
from multiworld.serve.wire.origin import Parent

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("environment", "is_on"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_environment_turns_traces_on(environment: dict[str, str], is_on: bool) -> None:
    assert is_wanted(environment) == is_on
    check(environment)


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
    ],
)
def test_what_is_not_there_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        check(environment)
    assert tracer_of(environment, "app", "p", {}) is None


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"multiworld-elastic\[otel\]"):
        check(ENDPOINT)


class Memory:
    """A processor that keeps spans."""

    def __init__(self) -> None:
        self.spans: list[object] = []

    def on_end(self, span: object) -> None:
        self.spans.append(span)


def made(sampler: str, **options: float) -> tuple[Tracer, Memory]:
    sampling = importlib.import_module("opentelemetry.sdk.trace.sampling")
    resources = importlib.import_module("opentelemetry.sdk.resources")
    memory = Memory()
    root = getattr(sampling, sampler)(**options)
    own = sampling.ParentBased(root)
    return Tracer(own, memory, resources.Resource({}), lambda: 50.0), memory


def test_sampler_decides_and_a_client_wins() -> None:
    never, _ = made("TraceIdRatioBased", rate=0.0)
    trace, span = "a" * 32, "b" * 16
    assert not never.root(None, trace, span, "x").is_sampled
    client = Parent("c" * 32, "d" * 16, is_sampled=True)
    assert never.root(client, trace, span, "x") == Parent(client.trace, span, True)


@pytest.mark.parametrize("rate", [0.0, 1e-5, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("is_parent_based", [True, False])
def test_share_of_new_traces_is_the_one_that_the_sampler_takes(
    rate: float, is_parent_based: bool
) -> None:
    sampling = importlib.import_module("opentelemetry.sdk.trace.sampling")
    resources = importlib.import_module("opentelemetry.sdk.resources")
    sampler = sampling.TraceIdRatioBased(rate)
    if is_parent_based:
        sampler = sampling.ParentBased(sampler)
    ours = Tracer(sampler, Memory(), resources.Resource({}))
    drawn = random.Random(rate)
    bound = sampling.TraceIdRatioBased.get_bound_for_rate(rate)
    near = [n for n in (bound - 1, bound) if 0 <= n < 1 << 64]
    for number in [*near, *(drawn.getrandbits(128) for _ in range(500))]:
        decision = sampler.should_sample(None, number, "x").decision
        found = ours.root(None, f"{number:032x}", "b" * 16, "x")
        assert found.is_sampled is decision.is_sampled()


def test_exported_span_is_what_was_recorded() -> None:
    own, memory = made("TraceIdRatioBased", rate=1.0)
    parent = Parent("a" * 32, "b" * 16, is_sampled=True)
    events = [("happened", 42.0, {"n": 1})]
    span = Span(
        "x", parent, 40.0, 45.0, {"k": "v"}, Kind.SERVER, "c" * 16, "broken", events
    )
    own.export([span, Span("root", Parent("a" * 32, "", True), 1.0, 0.5)])
    found, root = map(vars, memory.spans)
    shown = memory.spans[0]
    assert shown.context.span_id == int("c" * 16, 16)  # type: ignore[attr-defined]
    assert shown.parent.span_id == int("b" * 16, 16)  # type: ignore[attr-defined]
    assert shown.end_time - shown.start_time == 5_000_000_000  # type: ignore[attr-defined]
    (event,) = shown.events  # type: ignore[attr-defined]
    assert event.timestamp - shown.start_time == 2_000_000_000  # type: ignore[attr-defined]
    assert not shown.status.is_ok  # type: ignore[attr-defined]
    assert root["_parent"] is None
    assert root["_end_time"] == root["_start_time"]
    assert found["_name"] == "x"


def test_collector_that_hangs_keeps_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "FLUSH_S", 0.05)
    found, memory = made("TraceIdRatioBased", rate=1.0)
    is_free = threading.Event()
    memory.force_flush = lambda: is_free.wait(30.0)  # type: ignore[attr-defined]
    began_at = time.monotonic()
    found.close()
    is_free.set()
    assert time.monotonic() - began_at < 20.0
