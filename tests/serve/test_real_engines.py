"""Services whose replicas are real vLLM servers on CPUs, which are killed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.rivals.environment import default_folder, install, python_of
from benchmarks.serving.others import VLLM
from multiworld.demo import smollm2
from multiworld.serve.machines.usage import family_of
from tests.serve.harness import Served, served
from tests.serve.test_engines import Text, ready
from tests.serve.texts import client

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1800)]

COUNT, KILLS = 60, 4
READY_S = 300.0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "years": {"type": "array", "items": {"type": "integer"}, "minItems": 8},
    },
    "required": ["name", "years"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": 7},
    "penalised": {"seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "choices": {"seed": 5, "n": 2},
    "structured": {"seed": 9, "structured_outputs": {"json": SCHEMA}},
}


def model_of_vllm(**more: Any) -> dict[str, Any]:
    """Return a model of vLLM; its environment takes many minutes and gigabytes once."""
    folder = default_folder()
    install(VLLM, folder, print)
    return {
        "path": str(smollm2.fetch(print)),
        "engine": "vllm",
        "engine_python": str(python_of(VLLM, folder)),
        "generation": {"max_model_len": 1024, "max_num_seqs": 8, "dtype": "float32"},
        **more,
    }


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = model_of_vllm(replicas=2, deadline_s=300.0)
    spec = {"app": "vllm", "models": {"m": model}, "gateway": {"port": 0}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        with served(tmp_path_factory.mktemp("vllm"), spec) as made:
            yield made


async def all_kinds(
    api: openai.AsyncOpenAI, service: Served, draw: random.Random, number: int = 0
) -> dict[str, Any]:
    """Return the tokens of a stream of each kind; signal an engine, unless 0."""
    texts = {name: Text(api, kind, COUNT) for name, kind in KINDS.items()}
    if number:
        await texts["greedy"].has(draw.randrange(1, COUNT - 1))
        os.kill(engine(service, draw), number)
    return {name: await text.end() for name, text in texts.items()}


def engine(service: Served, draw: random.Random) -> int:
    """Return a process of vLLM without which it cannot compute."""
    found = [p for p in service.status().processes if p.name.startswith("m/")]
    replica = next(p.pid for p in found if p.phase == "ready")
    assert replica
    commands = {p: Path(f"/proc/{p}/cmdline").read_bytes() for p in family_of(replica)}
    # The path of the interpreter contains the word, too.
    helpers = b"resource_tracker", b"forkserver"
    found_pids = [
        pid
        for pid, text in commands.items()
        if b"vllm" in text.lower() and not any(word in text for word in helpers)
    ]
    return draw.choice(found_pids)


async def test_every_token_is_that_of_an_undisturbed_stream(service: Served) -> None:
    draw = random.Random(1)
    async with client(service) as api:
        undisturbed = await all_kinds(api, service, draw)
        assert await all_kinds(api, service, draw) == undisturbed
        for kill in range(KILLS):
            number = signal.SIGSTOP if kill == KILLS - 1 else signal.SIGKILL
            assert await all_kinds(api, service, draw, number) == undisturbed
            service.until(lambda: ready(service) == 2, "two replicas", READY_S)
