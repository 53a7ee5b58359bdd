"""Traces of a whole service, received and decoded as OTLP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve import otlp
from tests.serve.harness import WAIT_S, Served, body, served
from tests.serve.models import RAISE
from tests.serve.texts import Stream, asked, client, spec_of
from tests.tiny_decoder import save_decoder

pytestmark = pytest.mark.timeout(180)

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def receiver() -> Iterator[otlp.Receiver]:
    with otlp.receiving() as found:
        yield found


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, receiver: otlp.Receiver
) -> Iterator[Served]:
    """Only traces that their client samples are kept, failures and recoveries."""
    folder = save_decoder(tmp_path_factory.mktemp("decoder"))
    spec = spec_of(folder)
    spec["models"]["tensors"] = {
        "factory": "tests.serve.models:model",
        "stages": [{}, {}, {}],
    }
    spec["gateway"]["access_log"] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MULTIWORLD_LOG_FORMAT", "json")
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        patch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        with served(tmp_path_factory.mktemp("traced"), spec) as made:
            yield made


def wanted(count: int, **more: Any) -> dict[str, Any]:
    found = asked(count, **more)
    return {**found, **found.pop("extra_body")}


def sampled(number: int) -> tuple[str, dict[str, str]]:
    """Return a trace's id, and the header of a client that samples it."""
    trace = f"{TRACE[:-2]}{number:02x}"
    return trace, {"traceparent": f"00-{trace}-{PARENT}-01"}


def test_stream_has_a_span_for_each_phase_and_stage(
    service: Served, receiver: otlp.Receiver
) -> None:
    trace, headers = sampled(1)
    answer = httpx.post(
        f"{service.url}/v1/completions",
        json=wanted(6),
        headers={**headers, "X-Request-Id": "traced-1"},
        timeout=WAIT_S,
    )
    assert answer.status_code == 200
    stages = [f"stage m/{name}" for name in ("front", "middle", "back")]
    root = "text_completion m"
    spans = receiver.trace(trace, root, "queue", "prefill", "decode", *stages)
    by_name = {each.name: each for each in spans}
    assert len(spans) == len(by_name)
    (server,) = (each for each in spans if each.name == root)
    assert server.parent == PARENT
    assert all(each.parent == server.id for each in spans if each is not server)
    about = server.attributes
    assert about["gen_ai.operation.name"] == "text_completion"
    assert about["gen_ai.request.model"] == "m"
    assert about["gen_ai.usage.output_tokens"] == 6
    assert about["http.response.status_code"] == 200
    assert about["multiworld.request"] == "traced-1"
    assert server.process["service.name"] == "generates"
    assert server.process["deployment.environment.name"] == "test"
    for each in spans:
        assert server.began_ns <= each.began_ns <= each.ended_ns, each.name
    assert by_name["decode"].ended_ns <= server.ended_ns
    front = by_name[stages[0]]
    assert front.attributes["multiworld.steps"] >= 6
    assert front.attributes["multiworld.computed_s"] > 0.0
    assert front.process["service.instance.id"].startswith("m/0/")


def test_structure_has_a_span_for_its_grammar(
    service: Served, receiver: otlp.Receiver
) -> None:
    trace, headers = sampled(9)
    given = {**wanted(4), "structured_outputs": {"regex": "[ab]{9}"}}
    del given["ignore_eos"]
    url = f"{service.url}/v1/completions"
    answer = httpx.post(url, json=given, headers=headers, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    spans = receiver.trace(trace, "text_completion m", "grammar", "prefill")
    by_name = {each.name: each for each in spans}
    assert by_name["grammar"].parent == by_name["text_completion m"].id
    assert by_name["grammar"].ended_ns <= by_name["prefill"].began_ns


def test_request_has_a_span_for_each_stage(
    service: Served, receiver: otlp.Receiver
) -> None:
    trace, headers = sampled(2)
    url = f"{service.url}/v2/models/tensors/infer"
    answer = httpx.post(url, json=body(1.0), headers=headers, timeout=WAIT_S)
    assert answer.status_code == 200
    root = "POST /v2/models/{name}[/versions/{version}]/infer tensors"
    spans = receiver.trace(trace, root, "queue", "compute")
    names = [f"stage tensors/{number}" for number in range(3)]
    stages = [s for s in receiver.trace(trace, *names) if s.name in names]
    assert [s.attributes["multiworld.attempt"] for s in stages] == [1, 1, 1]
    (server,) = (each for each in spans if each.name == root)
    assert {each.parent for each in stages} == {server.id}


def test_what_nobody_samples_is_not_exported(
    service: Served, receiver: otlp.Receiver
) -> None:
    url = f"{service.url}/v1/completions"
    assert httpx.post(url, json=wanted(2), timeout=WAIT_S).status_code == 200
    trace, headers = sampled(3)  # what comes after it, comes later
    httpx.post(url, json=wanted(2), headers=headers, timeout=WAIT_S)
    receiver.trace(trace, "text_completion m")
    roots = [s for s in receiver.spans if s.name == "text_completion m"]
    assert all(each.parent == PARENT for each in roots)


async def test_stream_that_loses_a_stage_is_always_exported(
    service: Served, receiver: otlp.Receiver
) -> None:
    async with client(service) as api:
        streams = [Stream(api, 100) for _ in range(4)]
        await streams[0].has(5)
        await asyncio.to_thread(service.break_replica, "kill", "middle")
        for each in streams:
            await each.end()

    def is_whole(spans: list[otlp.Got]) -> bool:
        return any(s.attributes.get("multiworld.recovered") for s in spans)

    spans = await asyncio.to_thread(receiver.until, is_whole)
    root = next(s for s in spans if s.attributes.get("multiworld.recovered"))
    assert root.parent == ""
    names = [root.name, "queue", "prefill", "decode", "stage m/back"]
    found = await asyncio.to_thread(receiver.trace, root.trace, *names)
    lost = [s for s in found if s.is_error and "is retried" not in s.name]
    assert lost, [s.name for s in found]
    attempts = {s.attributes.get("multiworld.attempt") for s in found}
    assert len(attempts - {None}) >= 2
    await asyncio.to_thread(
        service.until, lambda: service.status().is_ready, "ready again"
    )


def test_failure_is_always_exported(service: Served, receiver: otlp.Receiver) -> None:
    url = f"{service.url}/v2/models/tensors/infer"
    answer = httpx.post(url, json=body(1.0, RAISE), timeout=WAIT_S)
    assert answer.status_code >= 500, answer.text
    status = str(answer.status_code)

    def of(spans: list[otlp.Got]) -> list[otlp.Got]:
        return [s for s in spans if s.attributes.get("error.type") == status]

    (failed,) = of(receiver.until(lambda found: bool(of(found))))
    assert failed.is_error


def test_start_of_each_replica_is_a_span(
    service: Served, receiver: otlp.Receiver
) -> None:
    def is_whole(spans: list[otlp.Got]) -> bool:
        started = {s.attributes.get("multiworld.process") for s in spans}
        return {p.name for p in service.status().processes if p.model} <= started

    spans = receiver.until(is_whole)
    start = next(s for s in spans if s.name == "start m/front")
    assert {"joined", "loaded"} <= set(start.events)


def test_lines_of_logs_name_the_request(service: Served) -> None:
    url = f"{service.url}/v2/models/tensors/infer"
    headers = {"X-Request-Id": "look-for-me"}
    answer = httpx.post(url, json=body(1.0), headers=headers, timeout=WAIT_S)
    assert answer.headers["x-request-id"] == "look-for-me"
    found = service.command(
        "logs", "--request", "look-for-me", "--state", str(service.state)
    )
    (log,) = found
    (line,) = map(json.loads, log["lines"])
    assert line["process"].startswith("gateway/")
    about = [line[name] for name in ("request", "method", "status", "logger")]
    assert about == ["look-for-me", "POST", 200, "multiworld.access"]


def test_every_answer_has_an_id(service: Served) -> None:
    for path in ("/v1/models", "/health", "/v2/models/m/ready", "/nowhere"):
        answer = httpx.get(f"{service.url}{path}", timeout=WAIT_S)
        assert len(answer.headers["x-request-id"]) == 32, path
