"""The routes of the admin interface and the types of their answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import pytest

from multiworld.errors import SpecError, UnknownModelError
from multiworld.serve.controller import admin, answers
from multiworld.serve.controller.admin import make_admin
from multiworld.serve.controller.answers import decode
from multiworld.serve.controller.controller import Controller
from multiworld.serve.controller.fleet.decision_log import DecisionLog
from multiworld.serve.controller.fleet.entries import HistoryEntry
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.fleet.reconciler import Reconciler
from multiworld.serve.controller.fleet.state import (
    DesiredModel,
    DesiredState,
    Process,
    ProcessPhase,
)
from multiworld.serve.controller.launchers.base import RunningProcess
from multiworld.serve.controller.placement.replica_placement import ReplicaBookings
from multiworld.serve.controller.status import StatusSources, status_of
from multiworld.serve.controller.tenant_manager import TenantManager
from multiworld.serve.machines.amounts import Gpu, Location, Need, Node
from multiworld.serve.spec.loader import parse_spec
from multiworld.serve.spec.schema import AppSpec, ModelSpec
from multiworld.serve.tenants.keys import known_as
from multiworld.serve.tenants.records import AuditEntry, UsageSum
from multiworld.serve.tenants.sqlite_registry import TenantDatabase
from multiworld.serve.tenants.usage_rows import UsageRow
from multiworld.serve.wire.control_messages import (
    GatewayReport,
    Reports,
    WorkerReport,
)
from tests.unit.serve.controller import examples

T = TypeVar("T")

SPEC = "app: under-test\nmodels: {m: {factory: 'a:b', version: '1', stages: [{}]}}"


class Operations:
    """Operations that change nothing."""

    def scale(
        self, model: str, stage: str, replicas: int, *, is_confirmed: bool
    ) -> answers.Scaled:
        if model == "x":
            raise UnknownModelError("no model 'x'")
        return answers.Scaled(1, replicas)

    def update(self, app: Any) -> int:
        if app.app == "other":
            raise SpecError("another name", problems=("app: other",))
        return 7

    def drain(self, name: str) -> None:
        pass

    def inject_fault(
        self, action: str, model: str, stage: str, seconds: float
    ) -> RunningProcess:
        return RunningProcess("m/0/1", 123, 0)


class FakeController:
    """A controller of one worker and one gateway that do not run."""

    def __init__(self, folder: Path) -> None:
        self.app = parse_spec(SPEC)
        self.specs: dict[str, dict[str, ModelSpec]] = {}
        self.history, self.journal = History(), DecisionLog()
        self.operations = Operations()
        self.fleet = Reconciler()
        self.fleet.desired = DesiredState({"m": DesiredModel("1", (1, 1))})
        for process in (
            Process("m/0/1", "m", "1", 0, ProcessPhase.READY, since=1.0),
            Process("gateway/1", since=2.0),
        ):
            self.fleet.processes[process.name] = process
        self.fleet.backoff.record_failure(("m", "1", 1), None, 3.0, "exit code 3")
        gpu = Gpu(0, "H200", 100)
        self.bookings = ReplicaBookings([Node("here", 4.0, 4000, (gpu,), "10.0.0.1")])
        need = Need(cpus=0.5, memory_bytes=2000, gpus=1, gpu_memory_bytes=40)
        spot = Location("here", (0,))
        self.bookings.ledger.restore("m/0/1", ("m", "1", 0), spot, need)
        self.tenanting = TenantManager(
            TenantDatabase(folder / "r.db"),
            self.history,
            list,
            lambda name, order: None,
        )

    async def identify(self, app: AppSpec) -> AppSpec:
        return app

    async def confirmed(self) -> None:
        pass

    def status(self) -> answers.StatusAnswer:
        return status_of(
            StatusSources(
                app=self.app,
                url="http://127.0.0.1:8000",
                store="127.0.0.1:29500",
                trouble="",
                operations=self.history.operations(10),
                dtypes={"m": "float32 (dtype)"},
                identities={"m": {"1": "c0ffee"}},
                is_ready=True,
                fleet=self.fleet,
                running={"m/0/1": RunningProcess("m/0/1", 123, 0)},
                bookings=self.bookings,
                log_of=lambda name: Path("/logs") / f"{name}.log",
                stage_name=lambda process: "" if process.is_gateway else "double",
                now=5.0,
            )
        )

    async def reports(self) -> Reports:
        return Reports(
            {"m/0/1": WorkerReport(queued=2)}, {"gateway/1": GatewayReport()}
        )


class Client:
    def __init__(self, controller: FakeController, ended: asyncio.Event) -> None:
        self.controller, self.ended = controller, ended
        app = make_admin(cast("Controller", controller), ended)
        transport = httpx.ASGITransport(app=app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://admin")

    async def ask(self, method: str, path: str, kind: type[T], **what: Any) -> T:
        response = await self.http.request(method, path, **what)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/json"
        return decode(response.content, kind)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    made = Client(FakeController(tmp_path), asyncio.Event())
    async with made.http:
        yield made
    await made.controller.tenanting.close()


async def test_status_is_as_the_examples_show(client: Client) -> None:
    client.controller.history.say("scale", "m: from 1 to 2")
    found = (await client.http.get("/status")).json()
    wanted: Any = examples.STATUS
    assert list(found) == list(wanted)
    for name in ("operations", "failing", "processes"):
        assert list(found[name][0]) == list(wanted[name][0])
    model = wanted["wanted"]["models"]["m"]
    assert list(found["wanted"]["models"]["m"]) == list(model)
    assert found["failing"][0]["cause"] == "exit code 3"
    worker, gateway = found["processes"]
    assert (worker["gpus"], worker["pid"], worker["since_s"]) == ([0], 123, 4.0)
    assert (gateway["phase"], gateway["pid"]) == ("launching", None)
    params = {"reports": True}
    status = await client.ask("GET", "/status", answers.StatusAnswer, params=params)
    assert status.worker_report("m/0/1") == WorkerReport(queued=2)
    assert status.gateway_report("gateway/1") == GatewayReport()
    text = (await client.http.get("/status", params=params)).json()
    assert list(text)[-1] == "reports"
    assert list(text["reports"]["m/0/1"]) == list(examples.WORKER_REPORT)
    assert list(text["reports"]["gateway/1"]) == list(examples.GATEWAY_REPORT)


async def test_nodes_have_free_resources_and_replicas(client: Client) -> None:
    (node,) = await client.ask("GET", "/nodes", list[answers.NodeShown])
    assert (node.free_cpus, node.free_memory_bytes) == (3.5, 2000)
    assert (node.free_gpu_memory_bytes, node.replicas) == ({0: 60}, ("m/0/1",))
    (found,) = (await client.http.get("/nodes")).json()
    assert json.dumps(found) == json.dumps({**examples.NODE, "key": ""})


async def test_decisions_have_snapshots_if_asked_for(client: Client) -> None:
    journal = client.controller.journal
    for number in range(3):
        inputs: Any = partial(dict, now=number)
        journal.record("scaling", "m", str(number), {"rate": 2.5}, inputs)
    journal.set_reason("scaling", "m", "enough")
    found = (await client.http.get("/decisions", params={"last": 2})).json()
    assert list(found) == ["decisions", "thoughts"]
    assert [list(d) for d in found["decisions"]] == [list(examples.DECISION)] * 2
    assert list(found["thoughts"][0]) == list(examples.THOUGHT)
    params = {"params": {"last": 1, "snapshots": True}}
    told = await client.ask("GET", "/decisions", answers.DecisionsAnswer, **params)
    assert told.decisions[0].snapshot == {"now": 2}
    assert told.thoughts[0].what == "enough"


async def test_events_are_read_on_from_a_number(client: Client) -> None:
    for kind in ("ready", "lost"):
        client.controller.history.say(kind, "text", "m/0/1")
    params = {"params": {"since": 1}}
    (event,) = await client.ask("GET", "/events", list[HistoryEntry], **params)
    assert (event.number, event.kind, event.name) == (2, "lost", "m/0/1")


async def test_update_has_the_time_of_the_model_that_needs_most(client: Client) -> None:
    """A client that waits for the update must not give up earlier."""
    desired = client.controller.fleet.desired.models
    desired["m"] = replace(desired["m"], start_s=600.0)
    updated = await client.ask("POST", "/update", answers.Updated, json={"text": SPEC})
    assert updated.ready_s == 600.0


async def test_update_that_fetches_a_model_holds_up_nobody(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, began = threading.Event(), threading.Event()

    def fetch(app: object) -> None:
        began.set()
        goes_on.wait(30.0)

    monkeypatch.setattr(admin, "fetch", fetch)
    spec = SPEC
    updating = asyncio.ensure_future(client.http.post("/update", json={"text": spec}))
    assert await asyncio.to_thread(began.wait, 30.0)
    assert (await client.http.get("/status")).status_code == 200
    client.ended.set()
    async with asyncio.timeout(30.0):
        answer = await updating
    assert answer.status_code == 409
    assert "shutting down" in answer.json()["error"]
    goes_on.set()


async def test_update_that_was_overtaken_is_refused(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later update neither waits for the download nor is undone by it."""
    goes_on, began = threading.Event(), threading.Event()

    def fetch(app: Any) -> None:
        if "slow" in app.models:
            began.set()
            goes_on.wait(30.0)

    monkeypatch.setattr(admin, "fetch", fetch)
    slow = {"text": SPEC.replace("{m:", "{slow:")}
    first = asyncio.ensure_future(client.http.post("/update", json=slow))
    assert await asyncio.to_thread(began.wait, 30.0)
    updated = await client.ask("POST", "/update", answers.Updated, json={"text": SPEC})
    assert updated.since == 7
    goes_on.set()
    overtaken = await first
    assert overtaken.status_code >= 400
    assert "a later update was applied" in overtaken.json()["error"]


async def test_update_before_anything_is_desired_has_the_versions_of_its_spec(
    client: Client,
) -> None:
    """Nothing is desired while the service waits for machines."""
    client.controller.fleet.desired.models.clear()
    updated = await client.ask("POST", "/update", answers.Updated, json={"text": SPEC})
    assert updated.versions == {"m": "1"}
    assert updated.ready_s == 120.0


async def test_keys_in_place_of_names_are_not_logged(client: Client) -> None:
    """A user may paste a whole key, whose secret must not be logged."""
    made = await client.ask(
        "POST", "/tenants", answers.TenantWithKey, json={"name": "acme"}
    )
    refused = await client.http.post(f"/tenants/{made.key}/revoke", json={"key": None})
    assert refused.status_code == 404
    assert made.key not in (await client.http.get("/audit")).text


async def test_chosen_key_is_not_logged(client: Client) -> None:
    """It stays valid if the name of its tenant was misspelt."""
    key = "correct-horse-battery-staple"
    refused = await client.http.post("/tenants/acmee/revoke", json={"key": key})
    assert refused.status_code == 404
    said = (await client.http.get("/audit")).text
    assert key not in said
    assert known_as(key)[0] in said


async def test_key_with_half_a_character_is_audited(client: Client) -> None:
    body = b'{"key": "\\ud800-correct-horse-battery"}'
    refused = await client.http.post("/tenants/acme/revoke", content=body)
    assert 400 <= refused.status_code < 500


async def test_operations_answer_with_their_outcome(client: Client) -> None:
    what: dict[str, Any] = {"model": "m", "stage": "0", "replicas": 2}
    scaled = await client.ask("POST", "/scale", answers.Scaled, json=what)
    assert scaled == answers.Scaled(1, 2)
    updated = await client.ask("POST", "/update", answers.Updated, json={"text": SPEC})
    assert updated == answers.Updated({"m": "1"}, 7, client.controller.app.ready_s)
    drained = await client.ask("POST", "/drain", answers.Drained, json={"name": "g"})
    assert drained == answers.Drained("g")
    what = {"action": "kill", "model": "m", "stage": "0"}
    broken = await client.ask("POST", "/chaos", answers.FaultInjected, json=what)
    assert broken == answers.FaultInjected("m/0/1", 123, "kill")
    assert not client.ended.is_set()
    ending = await client.ask("POST", "/shutdown", answers.ShuttingDown)
    assert ending == answers.ShuttingDown("under-test")
    assert client.ended.is_set()
    acts = await client.ask("GET", "/audit", list[AuditEntry])
    assert [act.act for act in acts] == [
        *("POST /scale", "POST /update", "POST /drain", "POST /chaos"),
        "POST /shutdown",
    ]
    assert acts[0].what == {"model": "m", "stage": "0", "replicas": 2}
    assert {act.outcome for act in acts} == {"done"}


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("scale", {"model": "m", "stage": "0", "replicas": 2}),
        ("update", {"text": SPEC}),
        ("drain", {"name": "g"}),
        ("chaos", {"action": "kill", "model": "m", "stage": "0"}),
    ],
)
async def test_service_that_ends_refuses_changes(
    client: Client, path: str, what: dict[str, Any]
) -> None:
    """It would ignore the changes."""
    client.ended.set()
    refused = await client.http.post(f"/{path}", json=what)
    assert refused.status_code == 409
    assert "the service is shutting down" in refused.json()["error"]


async def test_refusals_have_a_status_and_the_problems(client: Client) -> None:
    """An error without a status of its own is a conflict."""
    what = {"model": "x", "stage": "0", "replicas": 2}
    refused = await client.http.post("/scale", json=what)
    assert refused.status_code == 404
    assert refused.json() == {"error": "no model 'x'", "problems": []}
    text = SPEC.replace("under-test", "other")
    refused = await client.http.post("/update", json={"text": text})
    assert refused.status_code == 409
    assert refused.json() == {"error": "another name", "problems": ["app: other"]}


async def test_tenants_are_shown_without_digests(client: Client) -> None:
    """A key is shown only once, when it is made."""
    asked: dict[str, Any] = {"name": "acme", "rpm_limit": 5, "weight": 2}
    made = await client.ask("POST", "/tenants", answers.TenantWithKey, json=asked)
    assert made.keys[0].id in made.key
    (shown,) = (await client.http.get("/tenants")).json()
    assert list(shown) == list(examples.TENANT)
    assert list(shown["keys"][0]) == list(examples.TENANT["keys"][0])
    assert (shown["rpm_limit"], shown["weight"]) == (5, 2.0)
    limit: dict[str, Any] = {"json": {"rpm_limit": None}}
    changed = await client.ask("PATCH", "/tenants/acme", answers.TenantShown, **limit)
    assert changed.rpm_limit is None
    grace = {"json": {"grace_s": 60}}
    path = "/tenants/acme/rotate"
    rotated = await client.ask("POST", path, answers.TenantWithKey, **grace)
    assert len(rotated.keys) == 2
    assert rotated.key != made.key
    path, key = "/tenants/acme/revoke", {"json": {"key": made.keys[0].id}}
    kept = await client.ask("POST", path, answers.TenantShown, **key)
    assert [k.id for k in kept.keys] == [rotated.keys[1].id]
    gone = await client.ask("DELETE", "/tenants/acme", answers.TenantRemoved)
    assert gone == answers.TenantRemoved("acme")
    assert await client.ask("GET", "/tenants", list[answers.TenantShown]) == []


async def test_usage_is_summed(client: Client) -> None:
    row = UsageRow(60, "acme", "m", 9, 7, 1, 1, 7, 100, 200, 3.5)
    client.controller.tenanting.registry.add_usage("meter", 1, [row])
    (found,) = (await client.http.get("/usage")).json()
    assert json.dumps(found) == json.dumps({**examples.USAGE, "last_minute": 60})
    params = {"params": {"tenant": "acme", "by_minute": True}}
    (told,) = await client.ask("GET", "/usage", list[UsageSum], **params)
    assert (told.first_minute, told.requests, told.seconds) == (60, 9, 3.5)
