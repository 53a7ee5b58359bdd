"""Spans of requests at a gateway: which there are, and which are kept."""

from __future__ import annotations

import pytest

from multiworld.serve.tracing.request_trace import (
    MAX_SPANS,
    RequestTrace,
    WorkTrace,
)
from multiworld.serve.tracing.spans import Kind, Span
from multiworld.serve.tracing.stage_trace import StageTrace
from multiworld.serve.wire.origin import NOWHERE, Origin, Parent

TRACE = "a" * 32
OWN = Parent(TRACE, "b" * 16, is_sampled=True)
UNSAMPLED = Parent(TRACE, "b" * 16, is_sampled=False)


def shown(spans: list[Span]) -> list[tuple[str, float, float]]:
    return [(each.name, each.began_at, each.ended_at) for each in spans]


def test_phases_of_an_undisturbed_stream() -> None:
    trace = RequestTrace(OWN, None, 0.0)
    work = WorkTrace(trace, 1.0)
    for _ in range(3):  # a message to each stage
        work.attempt(1, ("a", "b", "c"), 2.0)
    for at in (3.0, 4.0, 5.0):
        work.answered(at)
    work.ended(6.0)
    root, *phases = trace.ended("chat m", 7.0, 200)
    assert shown([root]) == [("chat m", 0.0, 7.0)]
    assert (root.kind, root.id, root.parent.span) == (Kind.SERVER, OWN.span, "")
    assert shown(phases) == [
        ("queue", 1.0, 2.0),
        ("prefill", 2.0, 3.0),
        ("decode", 3.0, 6.0),
    ]
    assert {each.parent for each in phases} == {OWN}
    assert phases[1].attributes["multiworld.replicas"] == ("a", "b", "c")


def test_recovered_stream_is_kept_although_nobody_samples_it() -> None:
    trace = RequestTrace(UNSAMPLED, None, 0.0)
    work = WorkTrace(trace, 0.0)
    work.attempt(1, ("a",), 1.0)
    work.answered(2.0)
    work.lost("a was lost", 3.0)
    work.attempt(2, ("b",), 4.0)
    work.answered(5.0)
    work.ended(6.0)
    root, *phases = trace.ended("chat m", 6.0, 200)
    assert root.attributes["multiworld.recovered"] is True
    assert shown(phases) == [
        ("queue", 0.0, 1.0),
        ("prefill", 1.0, 2.0),
        ("decode", 2.0, 3.0),
        ("queue", 3.0, 4.0),
        ("prefill", 4.0, 5.0),
        ("decode", 5.0, 6.0),
    ]
    assert [each.error for each in phases] == ["", "", "a was lost", "", "", ""]


def test_hedge_is_a_span_beside_the_attempt_that_is_silent() -> None:
    trace = RequestTrace(UNSAMPLED, None, 0.0)
    work = WorkTrace(trace, 0.0, "compute")
    assert not work.is_computed
    work.attempt(1, ("a",), 1.0)
    assert work.is_computed
    work.hedge(2, "b", 2.0)
    work.ended(3.0)
    _, *spans = trace.ended("infer m", 3.0, 200)  # kept, as it recovered
    assert shown(spans) == [
        ("queue", 0.0, 1.0),
        ("compute", 1.0, 3.0),
        ("hedge", 2.0, 3.0),
    ]
    assert spans[2].attributes["multiworld.replicas"] == ("b",)


@pytest.mark.parametrize(
    ("status", "count"), [(200, 0), (404, 0), (429, 0), (499, 0), (500, 1), (503, 1)]
)
def test_failures_alone_are_kept_without_sampling(status: int, count: int) -> None:
    found = RequestTrace(UNSAMPLED, None, 0.0).ended("x", 1.0, status)
    assert len(found) == count
    assert all(each.error for each in found)


def test_moved_stream_is_not_kept_for_that() -> None:
    trace = RequestTrace(UNSAMPLED, None, 0.0)
    work = WorkTrace(trace, 0.0)
    work.attempt(1, ("a",), 1.0)
    work.answered(2.0)
    work.attempt(2, ("b",), 3.0)
    work.ended(4.0)
    assert trace.ended("x", 4.0, 200) == []


def test_span_of_the_client_is_the_parent() -> None:
    client = Parent(TRACE, "c" * 16, is_sampled=True)
    (root,) = RequestTrace(OWN, client, 0.0).ended("x", 1.0, 200)
    assert root.parent == client


def test_gateway_that_continues_a_request_exports_its_root() -> None:
    trace = RequestTrace(OWN, None, 0.0)
    work = WorkTrace(trace, 0.0)
    work.attempt(1, ("a",), 1.0)
    work.ended(2.0)
    found = trace.ended("x", 2.0, 200, is_continued=True)
    assert found
    assert all(each.parent == trace.own for each in found)


def test_spans_of_a_request_are_bounded() -> None:
    trace = RequestTrace(OWN, None, 0.0)
    work = WorkTrace(trace, 0.0)
    for number in range(2 * MAX_SPANS):
        work.attempt(number, ("a",), 1.0)
        work.note("again", 1.0)
    found = trace.ended("x", 2.0, 200)
    assert len(found) == 1 + MAX_SPANS
    assert len(found[0].events) <= 64


def test_replica_has_a_span_for_a_sampled_sequence() -> None:
    found: list[Span] = []
    stage = StageTrace("m/0/1", "m/front", found.extend)
    key = ("g", 7, 1)
    stage.opened(key, Origin("id", OWN), 1.0)
    assert found == []
    stage.step([(key[:2], 5), (("g", 8), 1)], 2.0, 3.0)
    stage.step([(key[:2], 1)], 3.0, 3.5)
    stage.step([(key[:2], 4)], 4.0, 4.5, "rebuilding KV")
    stage.closed(key[:2], 5.0)
    (span,) = found
    assert (span.name, span.parent, span.began_at, span.ended_at) == (
        "stage m/front",
        OWN,
        1.0,
        5.0,
    )
    about = span.attributes
    assert about["multiworld.computed_s"] == 2.0
    assert (about["multiworld.steps"], about["multiworld.rows"]) == (3, 10)
    assert [name for name, _, _ in span.events] == ["first step", "rebuilding KV"]
    stage.closed(key[:2], 6.0)
    assert found == [span]


def test_next_attempt_ends_the_span_of_the_one_before() -> None:
    found: list[Span] = []
    stage = StageTrace("m/0/1", "m/front", found.extend)
    stage.opened(("g", 7, 1), Origin("id", OWN), 1.0)
    stage.opened(("g", 7, 2), Origin("id", OWN), 2.0)
    stage.closed(("g", 7), 3.0)
    assert [span.attributes["multiworld.attempt"] for span in found] == [1, 2]


def test_replica_keeps_nothing_of_what_nobody_samples() -> None:
    found: list[Span] = []
    stage = StageTrace("m/0/1", "m/front", found.extend)
    for origin in (NOWHERE, Origin("id"), Origin("id", UNSAMPLED)):
        stage.opened(("g", 7, 1), origin, 1.0)
        stage.step([(("g", 7), 1)], 1.0, 2.0)
        stage.closed(("g", 7), 2.0)
        stage.computed(origin, 1, (0.0, 1.0, 2.0), 1)
    assert found == []
