"""The answers of the controller on the wire, including malformed ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from multiworld.serve.controller import answers
from multiworld.serve.controller.answers import AnswerFormError, decode, encode, plain
from multiworld.serve.controller.fleet.entries import Decision, HistoryEntry
from multiworld.serve.tenants.records import AuditEntry, UsageSum
from multiworld.serve.wire.control_messages import GatewayReport, WorkerReport
from tests.unit.serve.controller import examples

EXAMPLES: list[tuple[Any, Any]] = [
    (answers.Scaled, {"before": 1, "replicas": 2}),
    (answers.Updated, {"versions": {"m": "2"}, "since": 7, "ready_s": 120.0}),
    (answers.Drained, {"name": "m/0/1"}),
    (answers.FaultInjected, {"name": "m/0/1", "pid": 123, "action": "kill"}),
    (answers.ShuttingDown, {"app": "shop"}),
    (answers.RefusedByController, {"error": "no", "problems": ["line 1"]}),
    (answers.RefusedByController, {"error": "no"}),
    (answers.TenantShown, examples.TENANT),
    (list[answers.TenantShown], [examples.TENANT, examples.TENANT]),
    (answers.TenantWithKey, {**examples.TENANT, "key": "mw-0123456789ab-secret"}),
    (answers.TenantRemoved, {"name": "acme"}),
    (answers.StatusAnswer, examples.STATUS),
    (answers.StatusAnswer, examples.WITH_REPORTS),
    (list[answers.NodeShown], [examples.NODE]),
    (
        answers.DecisionsAnswer,
        {"decisions": [examples.DECISION], "thoughts": [examples.THOUGHT]},
    ),
    (Decision, {**examples.DECISION, "snapshot": {"now": 1.5}}),
    (list[HistoryEntry], examples.STATUS["operations"]),
    (list[UsageSum], [examples.USAGE]),
    (list[AuditEntry], [examples.AUDIT]),
]


@pytest.mark.parametrize(("kind", "wire"), EXAMPLES)
def test_answer_survives_encoding(kind: Any, wire: Any) -> None:
    """Field names, nesting and order must not change on the wire."""
    text = json.dumps(wire)
    answer = decode(text, kind)
    assert decode(encode(answer), kind) == answer
    assert json.dumps(plain(answer)) == text
    assert json.dumps(json.loads(encode(answer))) == text


@pytest.mark.parametrize(("kind", "wire"), EXAMPLES)
def test_answer_with_fields_of_a_later_release_is_read(kind: Any, wire: Any) -> None:
    one = wire[0] if isinstance(wire, list) else wire
    later = {**one, "later": {"a": [1]}}
    text = json.dumps([later] if isinstance(wire, list) else later)
    assert decode(text, kind)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"null",
        b"[]",
        b"{}",
        b'{"before": 1}',
        b'{"before": 1, "replicas": "two"}',
        b'{"before": 1, "replicas": 2',
    ],
)
def test_answer_of_another_form_is_refused(content: bytes) -> None:
    with pytest.raises(AnswerFormError):
        decode(content, answers.Scaled)


def test_reports_are_those_of_their_processes() -> None:
    status = decode(json.dumps(examples.WITH_REPORTS), answers.StatusAnswer)
    worker, gateway = status.processes
    assert (worker.is_gateway, gateway.is_gateway) == (False, True)
    report = status.worker_report(worker.name)
    assert isinstance(report, WorkerReport)
    assert (report.queued, report.counts) == (1, {"requests": 7})
    other = status.gateway_report(gateway.name)
    assert isinstance(other, GatewayReport)
    assert other.load == {"m/0/1": 2}
    assert status.worker_report("m/9/9") is None
    without = decode(json.dumps(examples.STATUS), answers.StatusAnswer)
    assert without.worker_report(worker.name) is None
    assert without.gateway_report(gateway.name) is None


@pytest.mark.parametrize("name", ["m/0/1", "gateway/1"])
def test_report_of_another_form_is_refused(name: str) -> None:
    """The error comes when the status is decoded, not when the report is read."""
    reports = {**examples.WITH_REPORTS["reports"], name: {"counts": "many"}}
    text = json.dumps({**examples.STATUS, "reports": reports})
    with pytest.raises(AnswerFormError, match="counts"):
        decode(text, answers.StatusAnswer)


def test_facts_of_a_policy_may_be_anything() -> None:
    class Odd:
        def __str__(self) -> str:
            return "odd"

    decided = Decision(1, 2.0, "scaling", "m", "more", {"fact": Odd()})
    assert decode(encode(decided), Decision).facts == {"fact": "odd"}
