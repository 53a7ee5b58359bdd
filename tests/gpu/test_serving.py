"""Services on one GPU; each replica books a part of its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from multiworld.serve.controller.answers import Drained
from tests.serve.harness import Served, served, spec_with, traffic
from tests.serve.models import expected
from tests.serve.texts import (
    COUNT,
    PROMPT,
    STAGES,
    Stream,
    client,
    post,
    spec_of,
    undisturbed,
)
from tests.tiny_decoder import greedy, save_decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.timeout(300),
]
ON_GPU: dict[str, Any] = {"device": "cuda", "gpu_memory_mb": 1000}


def test_answers_are_right_and_none_is_lost(tmp_path: Path) -> None:
    """The model's module asks for a GPU when the fork server imports it."""
    stages = [{"name": name, **ON_GPU} for name in ("double", "add", "square")]
    stages[1]["replicas"] = 2
    asking = "tests.gpu.asking_model:model"
    with served(tmp_path, spec_with(m_stages=stages, m_factory=asking)) as service:
        answer = service.infer(3.0)
        assert answer.status_code == 200, answer.text
        assert answer.json()["outputs"][0]["data"] == [expected(3.0)]

        async def kill_under_load() -> None:
            async with traffic(service):
                harm = service.break_replica
                await asyncio.to_thread(harm, "kill", "add")

        asyncio.run(kill_under_load())
        service.until(lambda: service.status().is_ready, "full strength")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, dtype: str) -> Path:
    path = tmp_path_factory.mktemp("decoder")
    return save_decoder(path, dtype=getattr(torch, dtype))


@pytest.fixture(scope="module")
def service(
    folder: Path, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    stages = [{"name": name, "replicas": 2, **ON_GPU} for name in STAGES]
    spec = spec_of(folder, stages=stages)
    spec["models"]["m"]["generation"]["dtype"] = dtype
    with served(tmp_path_factory.mktemp("generates"), spec) as made:
        yield made


@pytest.fixture(scope="module")
def pieces(service: Served) -> list[str]:
    return undisturbed(service)


def test_output_is_that_of_transformers(
    service: Served, folder: Path, dtype: str
) -> None:
    """In bfloat16, near ties may differ."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0}
    more = {"ignore_eos": True, "return_token_ids": True}
    answer = post(service, "/v1/completions", {**body, **more})
    found = answer.json()["choices"][0]["token_ids"]
    assert len(found) == COUNT
    if dtype == "float32":
        assert found == greedy(folder, PROMPT, COUNT)


@pytest.mark.parametrize("stage", STAGES)
async def test_stream_survives_the_loss_of_a_stage(
    service: Served, pieces: list[str], stage: str
) -> None:
    for index in (1, COUNT // 2):
        async with client(service) as api:
            stream = Stream(api)
            await stream.has(index)
            await asyncio.to_thread(service.break_replica, "kill", stage)
            assert await stream.end() == pieces
        await asyncio.to_thread(
            service.until, lambda: service.status().is_ready, "full strength"
        )


async def test_streams_of_a_drained_replica_are_moved(
    service: Served, pieces: list[str]
) -> None:
    """Keys and values cross by way of the host."""
    for stage in range(3):
        async with client(service) as api:
            streams = [Stream(api) for _ in range(4)]
            for stream in streams:
                await stream.has(3)
            name = next(
                p.name
                for p in service.status().processes
                if p.model and p.stage == stage and p.phase == "ready"
            )
            await asyncio.to_thread(
                service.ask, "POST", "/drain", Drained, json={"name": name}
            )
            found = [await stream.end() for stream in streams]
        assert found == [pieces] * 4
        await asyncio.to_thread(
            service.until, lambda: service.status().is_ready, "full strength"
        )


def test_gpu_memory_of_replicas_is_reported(service: Served) -> None:
    """It is what torch has reserved, and is within what each replica books."""

    def is_whole() -> bool:
        return sum(bool(p.model) for p in service.status().processes) == 2 * len(STAGES)

    service.until(is_whole, "none is on its way out")
    status = service.status(reports=True)
    for name in [p.name for p in status.processes if p.model]:
        report = status.worker_report(name)
        assert report is not None
        assert 0 < report.gpu_memory_bytes <= ON_GPU["gpu_memory_mb"] << 20
