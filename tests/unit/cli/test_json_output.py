"""Output of commands, with ``--json`` and as text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from multiworld.cli.main import cli
from tests.unit.serve.controller import examples
from tests.unit.serve.controller.service import CannedService

STATUS = "/status?reports=true"
PROCESSES = {
    "m/0/1": "generates 2 sequences; its step has taken 0.2 s so far; 1 sequence "
    "waiting",
    "gateway/1": "3 requests in flight (2 at m/0/1), 1 waiting to be sent",
}
DECIDED = {"decisions": [examples.DECISION], "thoughts": [examples.THOUGHT]}
RESOURCES = {
    "replicas": [
        {
            "name": "m/0/1",
            "node": "here",
            "phase": "ready",
            "booked_cpus": 0.5,
            "booked_memory_bytes": 2000,
            "memory_bytes": 1000,
            "gpu_memory_bytes": 0,
            "cpu_s": 4.5,
            "computed_s": 12.5,
        }
    ],
    "unplaced": examples.STATUS["unplaced"],
}
UPDATED = {"versions": {"m": "1"}, "since": 7, "ready_s": 120.0}
KEYED = {**examples.TENANT, "key": "mw-0123456789ab-secret"}
BROKEN = {"name": "m/0/1", "pid": 123, "action": "kill"}


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def output(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], *words: str
) -> str:
    service = CannedService(answers)
    for module in ("options", "nodes"):
        monkeypatch.setattr(
            f"multiworld.cli.{module}.Service", lambda app, state: service
        )
    done = CliRunner().invoke(cli, [*words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    ("words", "answers", "wanted"),
    [
        ("status", {STATUS: examples.WITH_REPORTS}, examples.WITH_REPORTS),
        ("resources", {STATUS: examples.WITH_REPORTS}, RESOURCES),
        ("nodes --app x", {"/nodes": [examples.NODE]}, [examples.NODE]),
        (
            "explain",
            {
                STATUS: examples.WITH_REPORTS,
                "/facts": examples.FACTS,
                "/decisions?last=10&snapshots=false": DECIDED,
            },
            {
                "processes": PROCESSES,
                "troubles": examples.FACTS["troubles"],
                "slow": {"m/0/1": "a step takes 3 ms"},
                "bottlenecks": {"m": "stage double computes 97% of the time"},
                **DECIDED,
                "events": examples.WITH_REPORTS["operations"],
            },
        ),
        ("tenants list", {"/tenants": [examples.TENANT]}, [examples.TENANT]),
        (
            "tenants create acme",
            {"/tenants": KEYED, "/status": examples.STATUS},
            KEYED,
        ),
        (
            "tenants rotate acme",
            {"/tenants/acme/rotate": KEYED, "/status": examples.STATUS},
            KEYED,
        ),
        (
            "tenants set acme --weight 2",
            {"/tenants/acme": examples.TENANT},
            [examples.TENANT],
        ),
        (
            "tenants revoke acme",
            {"/tenants/acme/revoke": examples.TENANT},
            [examples.TENANT],
        ),
        (
            "tenants usage",
            {"/usage?since=0.0&by_minute=false": [examples.USAGE]},
            [examples.USAGE],
        ),
        ("audit", {"/audit?last=20": [examples.AUDIT]}, [examples.AUDIT]),
        (
            "scale m add 2",
            {"/scale": {"before": 1, "replicas": 2}},
            {"before": 1, "replicas": 2},
        ),
        ("drain m/0/1", {"/drain": {"name": "m/0/1"}}, {"name": "m/0/1"}),
        ("chaos kill m add", {"/chaos": BROKEN}, BROKEN),
        (
            "update SPEC --no-wait",
            {"/status": examples.STATUS, "/update": UPDATED},
            UPDATED,
        ),
        (
            "update SPEC",
            {"/update": UPDATED, "/events?since=7": [], "/status": examples.STATUS},
            {**UPDATED, "failure": ""},
        ),
    ],
)
def test_json_is_what_the_controller_sends(
    monkeypatch: pytest.MonkeyPatch, words: str, answers: dict[str, Any], wanted: Any
) -> None:
    named = words.replace("SPEC", __file__).split()
    text = output(monkeypatch, answers, *named, "--json")
    assert text == json.dumps(wanted, indent=2) + "\n"


def test_words_of_a_suspension_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = "see [/billing]"
    tenant = {**examples.TENANT, "is_suspended": True, "suspension": words}
    text = output(monkeypatch, {"/tenants": [tenant]}, "tenants", "list")
    assert "[/billing]" in text


def test_removed_tenant_is_one_line_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form is that from before answers had types."""
    answers = {"/tenants/acme": {"name": "acme"}}
    text = output(monkeypatch, answers, "tenants", "delete", "acme", "--json")
    assert text == '{"name": "acme"}\n'


@pytest.mark.parametrize(
    ("words", "answers", "wanted"),
    [
        (
            "status",
            {STATUS: examples.WITH_REPORTS, "/facts": examples.FACTS},
            [
                "under-test is ready",
                "m/0/1",
                "12 s",
                "m, stage 1: failed 2 times; next start in 2 s",
                "m, stage 1 keeps failing: exit code 3",
                "m: 2.5 requests/s",
                "answers 12 ms (p99 1.5 s)",
                "stage double computes 97% of the time",
                "m/0/1 is slow: it waits",
            ],
        ),
        ("resources", {STATUS: examples.WITH_REPORTS}, ["m/0/1", "4.5 s", "12.5 s"]),
        (
            "streams",
            {"/facts": {**examples.FACTS, "streams": examples.STREAMS}},
            ["r-1", "bolt", "none yet, prompt 1,800", "42.5 s", "7 after 5", "m/0/1"],
        ),
        (
            "streams --tenant acme",
            {"/facts": {**examples.FACTS, "streams": examples.STREAMS}},
            ["r-2", "computing, attempt 1"],
        ),
        (
            "nodes --app x",
            {"/nodes": [examples.NODE]},
            ["3.5 free of 4", "0 H200 (0 MiB free of 0 MiB)", "m/0/1"],
        ),
        (
            "explain",
            {
                STATUS: examples.WITH_REPORTS,
                "/facts": examples.FACTS,
                "/decisions?last=10&snapshots=false": DECIDED,
            },
            [
                *PROCESSES.values(),
                "needs attention:\n  m, stage 1 keeps failing: exit code 3\n",
                "m/0/1 is slow: it waits",
                "m: stage double computes 97% of the time",
                "scale: m: from 1 to 2",
                "scaling of m (",
                "scaling m: [1] → [2]",
            ],
        ),
        (
            "tenants list",
            {"/tenants": [examples.TENANT]},
            ["(operator)", "rpm_limit 5", "bytes_per_s 1,500.5", "ba9876543210 (expir"],
        ),
        (
            "tenants usage --csv",
            {"/usage?since=0.0&by_minute=false": [examples.USAGE]},
            [
                ",".join(examples.USAGE) + "\n",
                ",".join(map(str, examples.USAGE.values())) + "\n",
            ],
        ),
        (
            "tenants usage --by-minute",
            {"/usage?since=0.0&by_minute=true": [examples.USAGE]},
            ["acme", "500.0"],
        ),
        ("audit", {"/audit?last=20": [examples.AUDIT]}, ["model=m, replicas=2"]),
        (
            "scale m add 2",
            {"/scale": {"before": 1, "replicas": 2}},
            ["m/add: from 1 to 2 replicas\n"],
        ),
        (
            "drain m/0/1",
            {"/drain": {"name": "m/0/1"}},
            ["m/0/1: starting its replacement; then it finishes its work and exits\n"],
        ),
        ("chaos kill m add", {"/chaos": BROKEN}, ["kill: m/0/1 (process 123)\n"]),
    ],
)
def test_text_output_shows_the_same_facts(
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    answers: dict[str, Any],
    wanted: list[str],
) -> None:
    text = output(monkeypatch, answers, *words.split())
    for part in wanted:
        assert part in text.replace("\r\n", "\n"), text


def test_nodes_without_a_service_are_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Free resources and replicas are missing, as only a service books any."""
    monkeypatch.setattr("multiworld.cli.nodes.running", lambda: [])
    (node,) = json.loads(output(monkeypatch, {}, "nodes", "--json"))
    assert list(node) == list(examples.NODE)[:9]
    assert "this machine" in output(monkeypatch, {}, "nodes")
