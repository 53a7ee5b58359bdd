"""The HTTP application: its routes, its error formats, and clients that disconnect."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import re
from typing import Any

import httpx
import pytest
import torch

from multiworld.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    ModelFailedError,
    NoReplicaError,
    OverloadedError,
    QuarantinedError,
    RequestPoisonedError,
    ServeError,
    UnknownModelError,
)
from multiworld.serve.gateway.admission.timing import Phases
from multiworld.serve.gateway.http import request_body
from multiworld.serve.load.breakdown import phases_of
from multiworld.serve.routing.refusals import OutdatedError
from multiworld.serve.spec.schema import ModelSpec
from multiworld.serve.spec.stage import Model, Tensors, TensorSpec
from multiworld.serve.tenants.directory import Tenant
from multiworld.serve.wire.routing_table import ReplicaState, RoutingTable
from tests.unit.serve.edges import HANG_S
from tests.unit.serve.gateway.fakes import (
    MODEL,
    TEXT,
    Disconnecting,
    Fake,
    Hanging,
    body,
    doubled,
    raising,
)

INFER = "/v2/models/m/infer"
SCRIPT = "/static-offline-docs/swagger-ui-bundle.js"
ACME = Tenant(name="acme", models=("m",))
OPERATOR = Tenant(name="boss", is_operator=True)

GETS = [
    "/health",
    "/v2/health/live",
    "/v2/health/ready",
    "/version",
    "/metrics",
    "/v2",
    "/v2/models",
    "/v2/models/m",
    "/v2/models/m/versions/1",
    "/v2/models/m/ready",
    "/v2/models/m/versions/1/ready",
    "/v2/models/m/config",
    "/v2/models/m/versions/1/config",
    "/v1/models",
    "/v1/models/m",
    "/load",
    "/openapi.json",
    "/docs",
]


async def get(fake: Fake, path: str, tenant: str = "") -> httpx.Response:
    async with fake.client(tenant) as client:
        return await client.get(path)


async def infer(
    fake: Fake, *values: float, tenant: str = "", path: str = INFER, **more: Any
) -> httpx.Response:
    async with fake.client(tenant) as client:
        return await client.post(path, json=body(*values), **more)


# Routes that answer.


@pytest.mark.parametrize("path", GETS)
async def test_route_answers(path: str) -> None:
    answer = await get(Fake(), path)
    assert answer.status_code == 200
    if path not in ("/metrics", "/docs"):
        assert answer.headers["content-type"] == "application/json"
        answer.json()


async def test_every_route_is_among_the_tested_ones() -> None:
    """A new route needs a test here."""
    posts = [INFER, "/v2/models/m/versions/1/infer", "/v1/embeddings"]
    posts.append("/v2/repository/index")
    # These are in tests/serve/test_generation.py.
    posts += ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
    # These are in tests/serve/test_kept_streams.py.
    posts += ["/v1/streams/{id}", "/v1/streams/{id}/cancel"]
    for prefix in ("/v2/models/m", "/v2/models/m/versions/1"):
        posts += [f"{prefix}/generate", f"{prefix}/generate_stream"]
    tested = {
        re.sub(r"(models)/m", r"\1/{name}", path).replace("/1", "/{version}")
        for path in (*GETS, *posts)
    }
    there = Fake().app.rest.openapi()["paths"].keys()
    assert there == tested - {"/openapi.json", "/docs"}


async def test_answer_repeats_id_and_names_model_and_version() -> None:
    """The Open Inference Protocol requires it."""
    fake = Fake()
    async with fake.client() as client:
        answer = await client.post(INFER, json=body(1.0, 2.0, id="mine"))
    assert answer.status_code == 200
    said = answer.json()
    assert (said["model_name"], said["model_version"], said["id"]) == ("m", "1", "mine")
    assert said["outputs"][0]["data"] == [2.0, 4.0]
    assert fake.requests() == {("m", "200"): 1.0}


async def test_binary_answer_has_the_length_of_its_json_header() -> None:
    async with Fake().client() as client:
        asked = body(3.0, parameters={"binary_data_output": True})
        answer = await client.post(INFER, json=asked)
    length = int(answer.headers["inference-header-content-length"])
    assert answer.headers["content-type"] == "application/octet-stream"
    item = json.loads(answer.content[:length])["outputs"][0]
    assert item["parameters"] == {"binary_data_size": 4}
    values = torch.frombuffer(bytearray(answer.content[length:]), dtype=torch.float32)
    assert values.tolist() == [6.0]


async def test_large_body_is_parsed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large bodies are parsed in a thread, compressed or not."""
    monkeypatch.setattr(request_body, "OFFLOAD_BYTES", 10)
    content = json.dumps(body(4.0)).encode()
    async with Fake().client() as client:
        plain = await client.post(INFER, content=content)
        headers = {"content-encoding": "gzip"}
        packed = await client.post(
            INFER, content=gzip.compress(content), headers=headers
        )
        bad = await client.post(INFER, content=b"x" * 20)
    assert plain.json()["outputs"] == packed.json()["outputs"]
    assert plain.json()["outputs"][0]["data"] == [8.0]
    assert bad.status_code == 400


async def test_metadata_shows_inputs_and_outputs() -> None:
    said = (await get(Fake(), "/v2/models/m")).json()
    assert said["versions"] == ["1"]
    assert said["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1]}]
    assert said["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1]}]


# Deadlines and sessions.


@pytest.mark.parametrize(
    ("parameters", "header", "seconds"),
    [
        ({}, None, 30.0),  # as in the spec of the model
        ({}, "2.5", 2.5),
        ({"timeout_s": 3}, "2.5", 3.0),
        ({"timeout": 1_500_000}, None, 1.5),
        ({"timeout": 1_500_000}, "2.5", 2.5),
        ({"timeout_s": "4"}, None, 4.0),
        ({"timeout_s": 86400}, None, 86400.0),
    ],
)
async def test_deadline_of_a_request(
    parameters: dict[str, Any], header: str | None, seconds: float
) -> None:
    """Triton's ``timeout`` is in microseconds."""
    fake = Fake()
    headers = {} if header is None else {"x-timeout-s": header}
    async with fake.client(**headers) as client:
        answer = await client.post(INFER, json=body(1.0, parameters=parameters))
    assert answer.status_code == 200
    assert fake.dispatcher.calls[0]["deadline_s"] == seconds


@pytest.mark.parametrize(
    "given", [0, -1, "soon", True, [], {}, 86401, "nan", "inf", 1e300, "-inf", ""]
)
async def test_impossible_deadline_is_refused(given: Any) -> None:
    fake = Fake()
    async with fake.client() as client:
        answer = await client.post(
            INFER, json=body(1.0, parameters={"timeout_s": given})
        )
    assert answer.status_code == 400
    assert "above 0 and at most 86400" in answer.json()["error"]
    assert fake.dispatcher.calls == []


@pytest.mark.parametrize(
    ("given", "session"),
    [(7, "\x007"), ("s", "\x00s"), (0, None), ("", None), (None, None)],
)
async def test_session_is_that_of_its_tenant(given: Any, session: str | None) -> None:
    """Session ids of two tenants do not collide; Triton's 0 means no session."""
    fake = Fake()
    async with fake.client() as client:
        await client.post(INFER, json=body(1.0, parameters={"sequence_id": given}))
    assert fake.dispatcher.calls[0]["session"] == session


# Errors.


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (InvalidRequestError("text"), 400, {}),
        (UnknownModelError("text"), 404, {}),
        (OverloadedError("text", retry_after_s=2.3), 429, {"retry-after": "3"}),
        (QuarantinedError("text", retry_after_s=0.1), 429, {"retry-after": "1"}),
        (ModelFailedError("text"), 500, {}),
        (RequestPoisonedError("text"), 500, {}),
        (NoReplicaError("text", retry_after_s=1.0), 503, {"retry-after": "1"}),
        (DeadlineExceededError("text"), 504, {}),
        (ServeError("text"), 500, {}),
    ],
)
@pytest.mark.parametrize("is_openai", [False, True])
async def test_error_has_the_form_of_its_protocol(
    error: ServeError, status: int, headers: dict[str, str], is_openai: bool
) -> None:
    fake = Fake()
    fake.dispatcher.answers = raising(error)
    async with fake.client() as client:
        if is_openai:
            asked = {"model": "t", "input": "x"}
            answer = await client.post("/v1/embeddings", json=asked)
            assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
            text = answer.json()["error"]["message"]
        else:
            answer = await client.post(INFER, json=body(1.0))
            text = answer.json()["error"]
    assert answer.status_code == status
    if type(error) is not UnknownModelError:  # the gateway lists the models there
        assert text == "text"
    assert {k: v for k, v in answer.headers.items() if k == "retry-after"} == headers
    assert fake.requests() == {("t" if is_openai else "m", str(status)): 1.0}


@pytest.mark.parametrize("error", [RuntimeError("secret"), InternalError("secret")])
async def test_bug_is_an_error_500_without_details(error: Exception) -> None:
    fake = Fake()
    fake.dispatcher.answers = raising(error)
    answer = await infer(fake, 1.0)
    assert answer.status_code == 500
    assert answer.json() == {"error": "internal error of the gateway; see its log"}
    assert fake.requests() == {("m", "500"): 1.0}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v2/nothing", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", INFER, 405),
        ("DELETE", "/v1/embeddings", 405),
        ("POST", "/v2/models/a/b/infer", 404),
    ],
)
async def test_unknown_address_answers_in_its_protocols_form(
    method: str, path: str, status: int
) -> None:
    async with Fake().client() as client:
        answer = await client.request(method, path)
    error = answer.json()["error"]
    text = error["message"] if path.startswith("/v1") else error
    assert answer.status_code == status
    assert text.startswith(f"{method} {path}: ")
    assert text.endswith("see /docs for the API")


async def test_method_not_allowed_lists_those_that_are() -> None:
    """RFC 9110 requires it for every 405."""
    assert (await get(Fake(), INFER)).headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v2/models/none/infer", "unknown model 'none'; available models: m, t"),
        ("/v2/models/m/versions/9/infer", "active version of this model is '1'"),
    ],
)
async def test_unknown_model_or_version_lists_what_there_is(
    path: str, words: str
) -> None:
    fake = Fake()
    posted = await infer(fake, 1.0, path=path)
    got = await get(fake, path.removesuffix("/infer"))
    ready = await get(fake, path.replace("/infer", "/ready"))
    for answer in (posted, got, ready):
        assert answer.status_code == 404
        assert words in answer.json()["error"]
    assert fake.dispatcher.calls == []


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v1/embeddings"])
async def test_answer_says_what_its_time_was_spent_on_if_asked(path: str) -> None:
    fake = Fake()
    content = body(1.0) if "infer" in path else {"model": "t", "input": ["a", "b"]}
    async with fake.client() as client:
        plain = await client.post(path, json=content)
        asked = await client.post(path, json=content, headers={"X-Timing": "1"})
        failed = await client.post(path, json={}, headers={"X-Timing": "1"})
    assert "server-timing" not in plain.headers
    assert "server-timing" not in failed.headers
    phases = phases_of(asked.headers["server-timing"])
    assert phases is not None
    assert list(phases) == list(Phases._fields)
    assert (phases["queue"], phases["compute"]) == (0.25, 0.5)
    counted = {
        labels[1]: value
        for kind, labels, value in fake.gateway.counted(fake.gateway.report())
        if kind == "phase_seconds"
    }
    assert (counted["queue"], counted["compute"]) == (0.5, 1.0)


async def test_unknown_models_do_not_become_labels_of_metrics() -> None:
    """A client could otherwise fill the memory with names."""
    fake = Fake()
    for number in range(5):
        await infer(fake, 1.0, path=f"/v2/models/none{number}/infer")
        async with fake.client() as client:
            asked = {"model": f"none{number}", "input": "x"}
            await client.post("/v1/embeddings", json=asked)
    assert fake.requests() == {("unknown", "404"): 10.0}


async def test_model_that_is_not_loaded_yet_is_to_be_retried() -> None:
    """The routing table can arrive before the spec."""
    fake = Fake()
    fake.gateway.models.clear()
    answer = await infer(fake, 1.0)
    assert answer.status_code == 503
    assert "not loaded yet" in answer.json()["error"]


async def test_output_that_the_model_did_not_return_is_named() -> None:
    """A model may return less than it declares."""
    fake = Fake()
    fake.dispatcher.answers = _nothing
    async with fake.client() as client:
        answer = await client.post(INFER, json=body(1.0, outputs=[{"name": "y"}]))
    assert answer.status_code == 400
    assert "returned no output y" in answer.json()["error"]


async def _nothing(model: str, tensors: Tensors) -> Tensors:
    return {}


# Readiness.


async def test_service_is_ready_when_no_stage_lacks_a_replica() -> None:
    """Stages that may scale to zero do not count, nor do dedicated replicas."""
    fake = Fake()
    fake.dispatcher.lacking = {"m": [0]}
    health = await get(fake, "/health")
    assert health.status_code == 503
    assert health.json() == {
        "status": "not ready",
        "stages_without_replica": {"m": [0], "t": []},
    }
    assert (await get(fake, "/v2/health/ready")).status_code == 503
    assert (await get(fake, "/v2/models/m/ready")).status_code == 503
    assert (await get(fake, "/v2/models/t/ready")).status_code == 200
    fake.serve(m=MODEL, m__acme=MODEL, on_demand=(0,))
    fake.dispatcher.lacking["m@acme"] = [1]
    assert (await get(fake, "/health")).status_code == 200
    assert (await get(fake, "/v2/models/m/ready")).status_code == 200


async def test_service_that_ends_or_serves_nothing_is_not_ready_but_lives() -> None:
    """A load balancer then sends it no requests, but does not kill it."""
    fake = Fake()
    fake.gateway.is_shutting_down = True
    assert (await get(fake, "/v2/health/ready")).status_code == 503
    assert (await get(fake, "/v2/health/live")).status_code == 200
    fake.gateway.is_shutting_down = False
    fake.dispatcher.table = RoutingTable()
    assert (await get(fake, "/health")).status_code == 503
    assert (await get(fake, "/v2/models")).json() == {"models": []}


# Tenants.


async def test_requests_without_a_valid_key_are_refused_everywhere() -> None:
    fake = Fake(ACME)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
        async with fake.client(**headers) as client:
            for path in (
                "/v2/models",
                "/v2/models/m",
                "/v2/models/m/ready",
                "/metrics",
            ):
                answer = await client.get(path)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
            for path in ("/v1/models", "/v1/models/m"):
                answer = await client.get(path)
                assert answer.json()["error"]["code"] == "invalid_api_key"
            posted = await client.post(INFER, json=body(1.0))
            assert posted.status_code == 401
            health = (await client.get("/health")).json()
            assert "stages_without_replica" not in health
    assert fake.requests() == {("unknown", "401"): 3.0}
    assert fake.dispatcher.calls == []


async def test_tenant_sees_and_uses_its_models_only() -> None:
    """The names of other models are not disclosed."""
    fake = Fake(ACME)
    assert (await get(fake, "/v2/models", "acme")).json() == {"models": [{"name": "m"}]}
    listed = (await get(fake, "/v1/models", "acme")).json()["data"]
    assert [model["id"] for model in listed] == ["m"]
    for path in ("/v2/models/t", "/v2/models/t/ready", "/v1/models/t"):
        answer = await get(fake, path, "acme")
        assert answer.status_code == 404
        assert "available models: m" in answer.text
    assert (await infer(fake, 1.0, tenant="acme")).status_code == 200
    assert fake.dispatcher.calls[0]["tenant"] == "acme"


async def test_metrics_are_for_operators_where_keys_are_needed() -> None:
    """Metrics show all tenants."""
    fake = Fake(ACME, OPERATOR)
    refused = await get(fake, "/metrics", "acme")
    assert refused.status_code == 401
    assert "operator" in refused.json()["error"]
    await infer(fake, 1.0, tenant="acme")
    shown = await get(fake, "/metrics", "boss")
    assert shown.status_code == 200
    assert 'tenant="acme"' in shown.text


async def test_parallel_request_slot_is_released_however_a_request_ends() -> None:
    fake = Fake(Tenant(name="acme", max_parallel_requests=1))
    hanging = fake.dispatcher.answers = Hanging()
    async with fake.client("acme") as client:
        first = asyncio.ensure_future(client.post(INFER, json=body(1.0)))
        await asyncio.wait_for(hanging.is_asked.wait(), HANG_S)
        second = await client.post(INFER, json=body(1.0))
        assert second.status_code == 429
        assert int(second.headers["retry-after"]) >= 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert hanging.is_cancelled.is_set()
        for answers, status in (
            (raising(ModelFailedError("no")), 500),
            (raising(RuntimeError("no")), 500),
            (doubled, 200),
        ):
            fake.dispatcher.answers = answers
            assert (await client.post(INFER, json=body(1.0))).status_code == status


async def test_dedicated_replicas_serve_their_tenant_until_they_are_removed() -> None:
    fake = Fake(Tenant(name="acme"), Tenant(name="beta"))
    fake.serve(m=MODEL, m__acme=MODEL)
    for tenant in ("acme", "beta"):
        assert (await infer(fake, 1.0, tenant=tenant)).status_code == 200
    assert [c["model"] for c in fake.dispatcher.calls] == ["m@acme", "m"]

    async def removed(model: str, tensors: Tensors) -> Tensors:
        if model == "m@acme":
            fake.serve(m=MODEL)
            raise UnknownModelError("model 'm@acme' is no longer served")
        return await doubled(model, tensors)

    fake.dispatcher.answers = removed
    fake.dispatcher.calls.clear()
    assert (await infer(fake, 1.0, tenant="acme")).status_code == 200
    assert [c["model"] for c in fake.dispatcher.calls] == ["m@acme", "m"]
    direct = await infer(fake, 1.0, tenant="acme", path="/v2/models/m@acme/infer")
    assert direct.status_code == 404


async def test_shared_replicas_serve_until_dedicated_ones_have_been_ready() -> None:
    """Once they have been ready, their tenant waits for them."""
    fake = Fake(Tenant(name="acme"))
    starting, ready = ReplicaState.STARTING, ReplicaState.READY
    for state, served in ((starting, "m"), (ready, "m@acme"), (starting, "m@acme")):
        fake.serve(state=state, m=MODEL, m__acme=MODEL)
        fake.dispatcher.calls.clear()
        assert (await infer(fake, 1.0, tenant="acme")).status_code == 200
        assert [c["model"] for c in fake.dispatcher.calls] == [served]


async def test_new_gateway_sends_no_request_of_a_tenant_to_others_replicas() -> None:
    fake = Fake(Tenant(name="acme"))
    fake.serve(m=MODEL, m__acme=MODEL)
    fake.dispatcher.lacking["m@acme"] = [0]
    assert (await infer(fake, 1.0, tenant="acme")).status_code == 200
    assert [c["model"] for c in fake.dispatcher.calls] == ["m@acme"]


async def test_token_ids_count_for_the_tenant() -> None:
    fake = Fake(Tenant(name="acme"))
    inputs = [TensorSpec("input_ids", "INT64", (-1, -1))]
    fake.serve("2", m=dataclasses.replace(MODEL, inputs=inputs))

    async def answers(model: str, tensors: Tensors) -> Tensors:
        return {"y": tensors["input_ids"].float()}

    fake.dispatcher.answers = answers
    ids = {"name": "input_ids", "datatype": "INT64", "shape": [1, 7], "data": [1] * 7}
    async with fake.client("acme") as client:
        for _ in range(2):
            answer = await client.post("/v2/models/m/infer", json={"inputs": [ids]})
            assert answer.status_code == 200
    meter = fake.gateway.authenticator.meter
    rows = [row for _, due in meter.take_due(0.0) for row in due]
    assert {row.model: row.prompt_tokens for row in rows} == {"m": 14}


async def test_poison_request_is_reported_once_and_not_retried() -> None:
    fake = Fake(Tenant(name="acme"), Tenant(name="beta"))
    told: list[Any] = []
    fake.gateway.on_poison = lambda *found: told.append(found)
    fake.dispatcher.answers = raising(RequestPoisonedError("it kills"))
    assert (await infer(fake, 6.0, tenant="acme")).status_code == 500
    fake.dispatcher.answers = doubled
    again = await infer(fake, 6.0, tenant="acme")
    assert again.status_code == 500
    assert "do not retry it" in again.json()["error"]
    assert len(fake.dispatcher.calls) == 1
    assert [found[:2] for found in told] == [("acme", ("m", "1"))]
    assert (await infer(fake, 7.0, tenant="acme")).status_code == 200
    assert (await infer(fake, 6.0, tenant="beta")).status_code == 200


async def test_several_poison_requests_quarantine_their_tenant_for_this_model() -> None:
    fake = Fake(Tenant(name="acme"))
    fake.dispatcher.answers = raising(RequestPoisonedError("it kills"))
    for number in range(20):
        answer = await infer(fake, float(number), tenant="acme")
        if answer.status_code == 429:
            break
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 1
    assert ("acme", "m") in fake.dispatcher.quarantined


# Clients that hang up, and models that change meanwhile.


async def test_client_that_hangs_up_withdraws_its_request() -> None:
    """499 is nginx's status for it."""
    fake = Fake()
    hanging = fake.dispatcher.answers = Hanging()
    client = Disconnecting(fake.app, INFER, json.dumps(body(1.0)).encode())
    running = asyncio.ensure_future(client.run())
    await asyncio.wait_for(hanging.is_asked.wait(), HANG_S)
    client.hang_up()
    await asyncio.wait_for(running, HANG_S)
    assert hanging.is_cancelled.is_set()
    assert fake.requests() == {("m", "499"): 1.0}


async def test_client_that_hangs_up_within_its_body_reaches_no_replica() -> None:
    fake = Fake()
    client = Disconnecting(fake.app, INFER, b'{"inputs"', b": [", is_whole=False)
    client.hang_up()
    await asyncio.wait_for(client.run(), HANG_S)
    assert fake.dispatcher.calls == []
    assert fake.requests() == {("m", "499"): 1.0}


async def test_server_that_ends_counts_what_it_cancels() -> None:
    fake = Fake()
    hanging = fake.dispatcher.answers = Hanging()
    client = Disconnecting(fake.app, INFER, json.dumps(body(1.0)).encode())
    running = asyncio.ensure_future(client.run())
    await asyncio.wait_for(hanging.is_asked.wait(), HANG_S)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert hanging.is_cancelled.is_set()
    assert fake.requests() == {("m", "499"): 1.0}


async def test_version_that_changes_during_the_upload_is_the_one_that_answers() -> None:
    """The inputs are checked against the model that computes them."""
    fake = Fake()

    async def content() -> Any:
        fake.serve("2", m=Model(stages=MODEL.stages, inputs=MODEL.inputs))
        yield json.dumps(body(1.0)).encode()

    async with fake.client() as client:
        answer = await client.post(INFER, content=content())
        assert answer.json()["model_version"] == "2"
        fixed = await client.post("/v2/models/m/versions/1/infer", json=body(1.0))
    assert fixed.status_code == 404


async def test_version_that_changes_while_a_request_waits_is_the_one_that_answers() -> (
    None
):
    fake = Fake()

    async def update(model: str, tensors: Tensors) -> Tensors:
        fake.serve("2", m=Model(stages=MODEL.stages, inputs=MODEL.inputs))
        fake.dispatcher.answers = doubled
        raise OutdatedError("version 1 is not active")

    fake.dispatcher.answers = update
    async with fake.client() as client:
        answer = await client.post(INFER, json=body(1.0))
        assert answer.json()["model_version"] == "2"
        fake.serve("1", m=MODEL)
        fake.dispatcher.answers = update
        fixed = await client.post("/v2/models/m/versions/1/infer", json=body(1.0))
    assert fixed.status_code == 404
    assert [call["version"] for call in fake.dispatcher.calls] == ["1", "2", "1"]


async def test_forgotten_versions_are_those_that_left_the_table() -> None:
    fake = Fake()
    await fake.gateway.text("t", "1", TEXT)
    fake.serve("2", t=TEXT)
    fake.gateway.table_changed()
    assert fake.gateway.models == {"m": {}, "t": {"2": TEXT}}
    assert fake.gateway.text_frontends == {}


async def test_files_of_the_docs_are_sent_in_one_piece() -> None:
    """No record tells another gateway which part of a file was sent."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": "GET",
        "path": SCRIPT,
        "root_path": "",
        "headers": [],
        "query_string": b"",
    }
    await Fake().app(scope, receive, send)
    start, only = sent
    assert dict(start["headers"])[b"content-type"].startswith(b"text/javascript")
    assert len(only["body"]) > 1_000_000
    assert not only.get("more_body")


async def test_rows_that_no_batch_can_hold_are_refused_before_they_are_charged() -> (
    None
):
    """They would count as the tenant's share, and delay its other requests."""
    fake = Fake()
    stages = [{"name": "a"}, {"name": "b", "max_batch_size": 4}]
    spec = ModelSpec.model_validate({"factory": "a:b", "stages": stages})
    fake.gateway.specs["m", "1"] = spec
    async with fake.client() as client:
        data = {"name": "x", "datatype": "FP32", "shape": [5], "data": [1.0] * 5}
        answer = await client.post("/v2/models/m/infer", json={"inputs": [data]})
        assert answer.status_code == 400
        assert "at most 4 (max_batch_size)" in answer.json()["error"]
        assert not fake.dispatcher.calls
        data.update(shape=[4], data=[1.0] * 4)
        answer = await client.post("/v2/models/m/infer", json={"inputs": [data]})
        assert answer.status_code == 200
