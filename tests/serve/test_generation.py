"""Generated text over HTTP: equal to that of transformers, whichever replica dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
import yaml
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from tests.serve.harness import WAIT_S, Served, served
from tests.serve.poisoned_decoder import GROW, HANG, POISON
from tests.serve.texts import (
    COUNT,
    PROMPT,
    STAGES,
    Stream,
    asked,
    client,
    is_whole,
    post,
    spec_of,
    undisturbed,
)
from tests.tiny_decoder import greedy, save_decoder

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[int]:
    return greedy(folder, PROMPT, COUNT)


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("generates"), spec_of(folder)) as made:
        yield made


async def test_output_is_that_of_transformers(
    service: Served, wanted: list[int]
) -> None:
    async with client(service) as api:
        whole = await api.completions.create(**asked())
        assert whole.usage is not None
        assert whole.usage.completion_tokens == COUNT
        assert whole.choices[0].finish_reason == "length"
        streams = [Stream(api) for _ in range(5)]
        texts = [await stream.end() for stream in streams]
    assert whole.choices[0].logprobs is not None
    pieces = whole.choices[0].logprobs.tokens
    assert pieces is not None
    assert len(pieces) == COUNT
    assert all(text == pieces for text in texts)
    body = {"model": "m", "tokens": wanted}
    shown = await asyncio.to_thread(post, service, "/detokenize", body)
    assert shown.json()["prompt"] == whole.choices[0].text


def test_chat_is_streamed_as_openais_clients_expect(service: Served) -> None:
    """The role comes first, then one end, and the usage last."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=WAIT_S)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [httpx.Response(200, text=line[6:]).json() for line in lines[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    ends = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert ends == [None] * (len(ends) - 1) + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert len({chunk["id"] for chunk in chunks}) == 1


async def kill_at(service: Served, action: str, stage: str, index: int) -> list[str]:
    """Break a stage when a stream has ``index`` tokens; return all its tokens."""
    async with client(service) as api:
        stream = Stream(api)
        await stream.has(index)
        harmed = await asyncio.to_thread(service.break_replica, action, stage)
        found = await stream.end()
    assert stream.finish == "length"

    def is_gone() -> bool:
        return harmed.name not in [p.name for p in service.status().processes]

    await asyncio.to_thread(service.until, is_gone, "gone")
    return found


@pytest.fixture(scope="module")
def pieces(service: Served) -> list[str]:
    return undisturbed(service)


@pytest.mark.parametrize("stage", STAGES)
async def test_stream_survives_the_loss_of_a_stage(
    service: Served, pieces: list[str], stage: str
) -> None:
    for index in (1, COUNT // 2):
        assert await kill_at(service, "kill", stage, index) == pieces
        await is_whole(service)


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", STAGES)
async def test_stream_survives_a_loss_at_every_token(
    service: Served, pieces: list[str], stage: str
) -> None:
    for index in range(COUNT):
        assert await kill_at(service, "kill", stage, index) == pieces, index
        await is_whole(service)


@pytest.mark.heavy
async def test_stream_survives_two_stages_at_once_and_a_stopped_one(
    service: Served, pieces: list[str]
) -> None:
    async with client(service) as api:
        stream = Stream(api)
        await stream.has(3)
        for stage in ("front", "back"):
            await asyncio.to_thread(service.break_replica, "kill", stage)
        assert await stream.end() == pieces
    await is_whole(service)
    assert await kill_at(service, "stop", "middle", 3) == pieces
    await is_whole(service)


async def test_stream_continues_without_controller_and_during_an_update(
    service: Served, pieces: list[str]
) -> None:
    """New streams use the new version; running ones complete on the old one."""
    async with client(service) as api:
        stream = Stream(api)
        await stream.has(2)
        service.kill_controller()
        assert await stream.end() == pieces
        await asyncio.to_thread(service.start)
        stream = Stream(api)
        await stream.has(2)
        service.spec["models"]["m"]["version"] = "2"
        text = yaml.safe_dump(service.spec, sort_keys=False)
        await asyncio.to_thread(service.update, text)
        assert await stream.end() == pieces

        def is_new() -> bool:
            versions = {p.version for p in service.status().processes if p.model}
            return versions == {"2"}

        await asyncio.to_thread(service.until, is_new, "updated")
        assert await Stream(api).end() == pieces


async def test_stream_continues_without_store_and_fork_server(
    service: Served, pieces: list[str]
) -> None:
    """The lost stage needs both of them to come back."""
    async with client(service) as api:
        stream = Stream(api)
        await stream.has(2)
        for helper in (service.fork_server(), service.store()):
            os.kill(helper, signal.SIGKILL)
        await asyncio.to_thread(service.break_replica, "kill", "back")
        assert await stream.end() == pieces
    await is_whole(service)


@pytest.mark.parametrize("which", ["store", "fork server", "controller", "heartbeat"])
async def test_stream_continues_while_a_helper_is_stopped_and_resumed(
    service: Served, pieces: list[str], which: str
) -> None:
    """They stop for longer than the silence after which a peer counts as lost."""
    stopped = {
        "store": lambda: [service.store()],
        "fork server": lambda: [service.fork_server()],
        "controller": lambda: [service.process.pid] if service.process else [],
        "heartbeat": service.heartbeat_helpers,
    }[which]()
    assert stopped
    async with client(service) as api:
        streams = [Stream(api) for _ in range(4)]
        for stream in streams:
            await stream.has(2)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(1.5)
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        assert [await stream.end() for stream in streams] == [pieces] * 4
        assert await Stream(api).end() == pieces
    await is_whole(service)


@pytest.mark.parametrize("room", [1, 0])
def test_prompt_may_be_as_long_as_the_context_less_one_token(
    service: Served, room: int
) -> None:
    listed = httpx.get(f"{service.url}/v1/models", timeout=WAIT_S).json()["data"]
    prompt = [5] * (listed[0]["max_model_len"] - room)
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
    answer = post(service, "/v1/completions", body)
    if room:
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 1
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    else:
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_client_that_hangs_up_frees_its_sequence(service: Served) -> None:
    async with client(service) as api:
        stream: Any = await api.completions.create(**asked(200), stream=True)
        async for _ in stream:
            break
        await stream.close()

    def is_free() -> bool:
        reports = service.status(reports=True)
        found = [reports.worker_report(p.name) for p in reports.processes if p.model]
        return all(r is not None and not r.computing and not r.queued for r in found)

    await asyncio.to_thread(service.until, is_free, "freed")


async def test_sequences_beyond_the_kv_memory_wait_or_are_preempted(
    service: Served,
) -> None:
    """There is 1 MiB for keys and values."""
    async with client(service) as api:
        streams = [Stream(api, 200) for _ in range(12)]
        texts = [await stream.end() for stream in streams]
    assert all(len(text) == 200 for text in texts)
    assert len({tuple(text) for text in texts}) == 1


def test_triton_generates_whole_and_streamed(
    service: Served, wanted: list[int]
) -> None:
    parameters = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    body = {"text_input": "abc", "id": "7", "parameters": parameters}
    url = "/v2/models/m/generate"
    whole = post(service, url, body).json()
    assert whole["model_name"] == "m"
    assert whole["id"] == "7"
    assert whole["text_output"].startswith("abc")
    excluded = {**body, "parameters": {**parameters, "exclude_input_in_output": True}}
    alone = post(service, url, excluded).json()["text_output"]
    assert whole["text_output"] == "abc" + alone
    streamed = post(service, "/v2/models/m/generate_stream", excluded)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [line[6:] for line in streamed.text.split("\n\n") if line]
    assert "".join(json.loads(e)["text_output"] for e in events) == alone
    assert len(events) > 1
    for changes, text in (
        ({"parameters": {"n": 2}}, "'n'"),
        ({"parameters": {"tempersture": 1}}, "tempersture"),
        ({"text": "abc"}, "text"),
    ):
        refused = post(service, url, {**body, **changes})
        assert refused.status_code == 400
        assert text in refused.json()["error"]
    assert post(service, "/v2/models/m/versions/9/generate", body).status_code == 404


def test_tritons_client_finds_a_model_that_generates(service: Served) -> None:
    """Its metadata name the inputs of Triton's vLLM backend."""
    with contextlib.closing(triton.InferenceServerClient(service.url[7:])) as asking:
        assert asking.is_server_ready()
        assert asking.is_model_ready("m")
        found = asking.get_model_metadata("m")
        assert [one["name"] for one in found["inputs"]] == ["text_input"]
        assert [one["name"] for one in found["outputs"]] == ["text_output"]
        (text,) = asking.get_model_config("m")["input"]
        assert text["data_type"] == "TYPE_STRING"
        given = triton.InferInput("text_input", [1], "BYTES")
        given.set_data_from_numpy(np.array([b"abc"], dtype=object))
        with pytest.raises(InferenceServerException, match="generate"):
            asking.infer("m", [given])


def is_stopped(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def test_time_limits_and_full_queues_are_reported_by_status(
    folder: Path, tmp_path: Path
) -> None:
    """A streamed request that is not accepted gets a status, and no stream."""
    spec = spec_of(folder, max_queued_requests=0)
    spec["models"]["m"]["generation"] |= {"first_token_s": 1.0, "max_num_seqs": 1}
    with served(tmp_path, spec) as service, ThreadPoolExecutor(6) as threads:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
        assert post(service, "/v1/completions", body).status_code == 200
        harmed = service.break_replica("stop", "back")
        service.until(lambda: is_stopped(harmed.pid), "stopped")
        streamed = {**body, "stream": True}
        found = [
            threads.submit(post, service, "/v1/completions", streamed) for _ in range(6)
        ]
        answers = [one.result() for one in found]
        late = [a for a in answers if "no first token within 1 s" in a.text]
        full = [a for a in answers if a.status_code == 429]
        # One that comes when the first is already late may be accepted, and answered.
        whole = [a for a in answers if a.text.endswith("data: [DONE]\n\n")]
        assert late, [a.text for a in answers]
        assert full, [a.text for a in answers]
        assert all(a in (*late, *full, *whole) for a in answers)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [5, 300]}, "prompt"),
        ({"prompt": [1] * 250, "max_tokens": 20}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"n": 65}, "n"),
        ({"stop": [""]}, "stop"),
        ({"suffix": "x"}, "suffix"),
        ({"stop": ["x" * 257]}, "stop"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"prompt": "x" * 100_000}, "prompt"),
        ({"stream": True, "echo": True, "logprobs": 1}, "echo"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_unsupported_parameter_is_refused_by_name(
    service: Served, changes: dict[str, Any], param: str
) -> None:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, **changes}
    answer = post(service, "/v1/completions", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"


def test_probabilities_of_the_prompt_are_those_of_transformers(
    service: Served, folder: Path
) -> None:
    """lm-eval requests them with echo, and with one token that it ignores."""
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        logits = kind.from_pretrained(folder).eval()(ids).logits[0]
    wanted = logits.log_softmax(-1)[torch.arange(len(PROMPT) - 1), ids[0, 1:]].tolist()
    body = {"model": "m", "prompt": [PROMPT, PROMPT], "max_tokens": 1, "echo": True}
    answer = post(service, "/v1/completions", {**body, "logprobs": 1}).json()
    for choice in answer["choices"]:
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None
        assert found["token_logprobs"][1:-1] == pytest.approx(wanted, abs=1e-3)
        assert len(found["tokens"]) == len(PROMPT) + 1
        assert all(1 <= len(top) <= 2 for top in found["top_logprobs"][1:])
        assert choice["text"].startswith("Once<end>upon<end>a<end>time")


async def test_metrics_count_tokens_and_times(service: Served) -> None:
    """All streams so far count; probes do not."""

    def value(name: str) -> float:
        lines = httpx.get(f"{service.url}/metrics", timeout=WAIT_S).text.splitlines()
        found = [line for line in lines if line.startswith(f'{name}{{model="m"')]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    names = ("prompt_tokens_total", "generation_tokens_total")
    before = [await asyncio.to_thread(value, f"multiworld_{n}") for n in names]
    async with client(service) as api:
        await Stream(api).end()
    after = [await asyncio.to_thread(value, f"multiworld_{n}") for n in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [len(PROMPT), COUNT]
    counted = "multiworld_time_per_output_token_seconds_count"
    assert await asyncio.to_thread(value, counted) >= 1


def test_cached_prefix_of_a_prompt_is_not_computed_again(
    folder: Path, tmp_path: Path
) -> None:
    """This holds in every stage, and for the same tenant only."""
    spec = spec_of(folder)
    spec["gateway"]["authentication"] = "keys"
    with served(tmp_path, spec) as service:
        state = ["--state", str(service.state)]
        keys = [
            service.command("tenants", "create", name, *state)["key"]
            for name in ("one", "other")
        ]
        operator = service.command("tenants", "create", "o", "--operator", *state)

        def ask(key: str, prompt: list[int]) -> list[int]:
            body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            answer = httpx.post(
                f"{service.url}/v1/completions",
                json={**body, "ignore_eos": True, "return_token_ids": True},
                headers={"authorization": f"Bearer {key}"},
                timeout=WAIT_S,
            )
            found: list[int] = answer.json()["choices"][0]["token_ids"]
            return found

        def hits() -> dict[str, float]:
            lines = httpx.get(
                f"{service.url}/metrics",
                headers={"authorization": f"Bearer {operator['key']}"},
                timeout=WAIT_S,
            ).text.splitlines()
            name = "multiworld_replica_prefix_cache_hits_total{"
            return {
                line.partition('replica="')[2].partition('"')[0]: float(
                    line.rsplit(" ", 1)[1]
                )
                for line in lines
                if line.startswith(name)
            }

        service.command("tenants", "set", "other", "--tpm-limit", "150", *state)
        prompt = [3 + n % 90 for n in range(100)]
        first = ask(keys[0], prompt)
        assert sum(hits().values()) == 0
        assert ask(keys[0], prompt) == first
        assert sorted(hits().values()) == [0, 96, 96, 96]
        assert ask(keys[1], prompt) == first
        assert sorted(hits().values()) == [0, 96, 96, 96]
        assert ask(keys[1], prompt) == first, "46 tokens were left"

        def refusal(key: str) -> str:
            got = httpx.post(
                f"{service.url}/v1/completions",
                json={"model": "m", "prompt": prompt},
                headers={"authorization": f"Bearer {key}"},
                timeout=WAIT_S,
            )
            assert got.status_code == 429
            assert int(got.headers["retry-after"]) > 0
            return str(got.json()["error"]["message"])

        assert "tpm_limit of 150" in refusal(keys[1])
        service.command("tenants", "set", "one", "--tokens-per-day", "208", *state)
        assert "tokens_per_day budget of 208" in refusal(keys[0])
        service.command("tenants", "set", "one", "--tokens-per-day", "0", *state)

        def tokens() -> dict[str, tuple[int, int]]:
            return {
                row["tenant"]: (row["prompt_tokens"], row["generated_tokens"])
                for row in service.command("tenants", "usage", *state)
                if row["model"] == "m"
            }

        service.until(
            lambda: tokens() == {"one": (200, 8), "other": (200, 8)}, "counted"
        )


# test_hangs.py and test_resources.py prove that a replica that hangs or grows ends;
# what follows is the same.
@pytest.mark.timeout(180)  # it kills its replica up to nine times
@pytest.mark.parametrize(
    "poison",
    [
        POISON,
        pytest.param(HANG, marks=pytest.mark.heavy),
        pytest.param(GROW, marks=pytest.mark.heavy),
    ],
)
def test_poison_prompt_is_refused_and_other_streams_complete(
    tmp_path: Path, poison: int
) -> None:
    """Streams that run beside it are whole, however often it kills their replica."""
    spec = spec_of(tmp_path)
    model = spec["models"]["m"]
    del model["path"]
    model |= {"factory": "tests.serve.poisoned_decoder:model", "deadline_s": 100.0}
    front = {"name": "front", "compute_s": 1.0}
    if poison == GROW:
        front = {"name": "front", "memory_mb": 300}
    model["stages"] = [front, {"name": "back"}]

    def ask(service: Served, prompt: list[int], count: int) -> httpx.Response:
        body = {"model": "m", "prompt": prompt, "max_tokens": count, "temperature": 0}
        return httpx.post(
            f"{service.url}/v1/completions",
            json={**body, "ignore_eos": True, "return_token_ids": True},
            timeout=110.0,
        )

    with (
        served(tmp_path / "service", spec) as service,
        ThreadPoolExecutor(5) as threads,
    ):
        good = [threads.submit(ask, service, [5 + k], 150) for k in range(4)]
        refused = threads.submit(ask, service, [7, poison], 5).result()
        assert refused.status_code == 500, refused.text
        assert (
            "2 replicas died while they computed it"
            in refused.json()["error"]["message"]
        )
        for k, found in enumerate(good):
            answer = found.result()
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            assert choice["token_ids"] == [(6 + k + n) % 200 for n in range(150)]
        outgrown = service.events("outgrown")
        assert bool(outgrown) == (poison == GROW)
        assert all(event.name.startswith("m/0/") for event in outgrown)
