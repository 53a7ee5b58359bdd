"""Services whose replicas are external engines, which are lost and replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from multiworld.serve.machines.usage import family_of
from tests import fake_token_server, fake_vllm
from tests.serve.harness import WAIT_S, Served, served, wait_for_exit
from tests.serve.texts import PROMPT, client
from tests.tiers import some
from tests.tiny_decoder import save_decoder

pytestmark = pytest.mark.timeout(240)

COUNT = 100
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 7},
    "penalised": {"seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "choices": {"seed": 5, "n": 2},
    "structured": {"seed": 9, "structured_outputs": {"regex": "([a-f]{2}-)+"}},
}
"""Sampling of each kind of request."""

WITHOUT = {"m": (), "terse": (), "l": ("structured",)}
"""Kinds that the engine of a model refuses."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = save_decoder(tmp_path_factory.mktemp("decoder"))
    model = {
        "path": str(folder),
        "engine": "vllm",
        "engine_python": str(fake_vllm.interpreter(folder)),
        "engine_args": {"block_size": 16},
        "adapters": {"terse": str(fake_vllm.adapter(folder / "terse"))},
        "generation": {"max_num_seqs": 32},
        "replicas": 2,
        "deadline_s": 60.0,
    }
    (folder / "weights.gguf").touch()
    python = str(fake_token_server.interpreter(folder, "--llama"))
    other = {
        **model,
        "engine": "llama.cpp",
        "engine_python": python,
        "engine_args": {},
        "adapters": {},
        "generation": {"max_num_seqs": 32, "max_model_len": 256},
    }
    limits = {
        "upscale_delay_s": 0.2,
        "downscale_delay_s": 1.0,
        "look_back_period_s": 2.0,
        "metrics_interval_s": 0.2,
    }
    scaled = {
        **other,
        "generation": {"max_num_seqs": 2, "max_model_len": 256},
        "autoscaling_config": {"min_replicas": 0, "max_replicas": 2, **limits},
    }
    del scaled["replicas"]
    dropped = ("generation", "adapters", "engine_args")
    rest = {name: value for name, value in model.items() if name not in dropped}
    embedding = {**rest, "embeddings": True}
    spec = {
        "app": "engines",
        "models": {"m": model, "l": other, "z": scaled, "e": embedding},
        "gateway": {"port": 0},
        "orphan_s": 2.0,
    }
    with served(tmp_path_factory.mktemp("engines"), spec) as made:
        yield made


class Text:
    """A stream of one kind, with its tokens by choice."""

    def __init__(
        self,
        api: openai.AsyncOpenAI,
        kind: dict[str, Any],
        count: int = COUNT,
        model: str = "m",
        prompt: Sequence[int] = PROMPT,
    ) -> None:
        self.tokens: dict[int, list[str]] = {}
        self._model, self._prompt = model, prompt
        self._count, self._grown = count, asyncio.Event()
        self._task = asyncio.ensure_future(self._read(api, dict(kind)))

    async def _read(self, api: openai.AsyncOpenAI, kind: dict[str, Any]) -> None:
        extra: dict[str, Any] = {"ignore_eos": True, "skip_special_tokens": False}
        if "structured_outputs" in kind:
            extra = {"structured_outputs": kind.pop("structured_outputs")}
        for name in ("top_k", "min_p", "repetition_penalty"):  # not OpenAI's
            if name in kind:
                extra[name] = kind.pop(name)
        stream: Any = await api.completions.create(
            model=self._model,
            prompt=list(self._prompt),
            max_tokens=self._count,
            logprobs=0,
            stream=True,
            extra_body=extra,
            **kind,
        )
        async for chunk in stream:
            for choice in chunk.choices:
                if choice.logprobs is not None:
                    found = self.tokens.setdefault(choice.index, [])
                    found += choice.logprobs.tokens
            self._grown.set()

    async def has(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.tokens.get(0, ())) < count:
                self._grown.clear()
                await self._grown.wait()

    async def end(self) -> dict[int, list[str]]:
        await self._task
        return self.tokens


async def all_kinds(
    api: openai.AsyncOpenAI, change: Any = None, model: str = "m"
) -> dict[str, Any]:
    """Return the tokens of a stream of each kind, during which ``change`` is called."""
    kinds = [name for name in KINDS if name not in WITHOUT[model]]
    streams = {name: Text(api, KINDS[name], COUNT, model) for name in kinds}
    if change is not None:
        await asyncio.sleep(0.4)
        await asyncio.to_thread(change)
    found = {name: await stream.end() for name, stream in streams.items()}
    counts = {name: [*map(len, tokens.values())] for name, tokens in found.items()}
    assert "structured" in WITHOUT[model] or counts.pop("structured")[0] >= 10
    assert counts.pop("choices") == [COUNT, COUNT]
    assert all(count == [COUNT] for count in counts.values())
    return found


def ready(service: Served, model: str = "m") -> int:
    """Return the number of ready replicas; 0 while any other is there."""
    found = [p for p in service.status().processes if p.model == model]
    return len(found) if all(p.phase == "ready" for p in found) else 0


def replica(service: Served, model: str = "m") -> int:
    """Return the process ID of a ready replica."""
    found = [p for p in service.status().processes if p.model == model]
    pid = next(p.pid for p in found if p.phase == "ready")
    assert pid
    return pid


def engine(service: Served, model: str = "m") -> int:
    """Return the process ID of a ready replica's engine."""
    (pid,) = (p for p in family_of(replica(service, model)) if is_engine(p))
    return pid


def is_engine(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"fake_vllm.py" in command or b"fake_token_server" in command


async def changed(service: Served, change: Any, model: str = "m") -> None:
    """Compare streams of all kinds during a change with undisturbed ones."""
    async with client(service) as api:
        undisturbed = await all_kinds(api, None, model)
        assert await all_kinds(api, change, model) == undisturbed
    service.until(lambda: ready(service, model) == 2, "two replicas are ready")


@pytest.mark.parametrize(
    ("number", "model"),
    some(
        [
            (signal.SIGKILL, "m"),
            (signal.SIGSTOP, "l"),
            (signal.SIGKILL, "l"),
            (signal.SIGSTOP, "m"),
        ],
        2,
    ),
)
async def test_streams_survive_the_loss_of_an_engine(
    service: Served, number: signal.Signals, model: str
) -> None:
    await changed(service, lambda: os.kill(engine(service, model), number), model)


async def test_adapters_are_models_of_their_own(service: Served) -> None:
    async with client(service) as api:
        parents = {m.id: (m.model_extra or {}).get("parent") for m in await listed(api)}
        assert parents == {"m": None, "terse": "m", "l": None, "z": None, "e": None}
        plain, adapted = [await all_kinds(api, None, name) for name in ("m", "terse")]
        assert plain["greedy"] != adapted["greedy"]
        kill = partial(lose, service)
        assert await all_kinds(api, kill, "terse") == adapted
        assert await all_kinds(api, None, "m") == plain
    service.until(lambda: ready(service) == 2, "two replicas are ready")


async def listed(api: openai.AsyncOpenAI) -> list[Any]:
    return (await api.models.list()).data


def lose(service: Served) -> None:
    os.kill(engine(service), signal.SIGKILL)


@pytest.mark.parametrize("number", some([signal.SIGSTOP, signal.SIGKILL], 1))
async def test_embeddings_survive_the_loss_of_an_engine(
    service: Served, number: signal.Signals
) -> None:
    texts = [f"text {index}" for index in range(40)]

    async def embedded(api: openai.AsyncOpenAI, text: str) -> list[float]:
        answer = await api.embeddings.create(model="e", input=text)
        return answer.data[0].embedding

    async with client(service) as api:
        undisturbed = [await embedded(api, text) for text in texts]
        assert len(undisturbed[0]) == fake_vllm.HIDDEN
        running = [asyncio.ensure_future(embedded(api, text)) for text in texts]
        os.kill(engine(service, "e"), number)
        assert await asyncio.gather(*running) == undisturbed
        assert [await embedded(api, text) for text in texts] == undisturbed
    service.until(lambda: ready(service, "e") == 2, "two replicas are ready")


@pytest.mark.heavy  # as a stage: test_no_replica_runs_without_requests
async def test_engine_is_scaled_from_zero_and_to_zero_again(service: Served) -> None:
    assert ready(service, "z") == 0
    async with client(service) as api:
        texts = [Text(api, {"seed": seed}, COUNT, "z") for seed in range(60)]
        grown = partial(ready, service, "z")
        await asyncio.to_thread(service.until, lambda: grown() == 2, "two replicas")
        for text in texts:
            assert len((await text.end())[0]) == COUNT
    service.until(lambda: ready(service, "z") == 0, "no replica is left")


async def test_parameters_that_an_engine_lacks_are_refused(service: Served) -> None:
    more = {"structured_outputs": {"regex": "[a-z]+"}}
    async with client(service) as api:
        with pytest.raises(openai.BadRequestError, match=r"llama\.cpp.*structured"):
            await api.completions.create(model="l", prompt=PROMPT, extra_body=more)
        await api.completions.create(model="m", prompt=PROMPT, extra_body=more)


async def test_streams_survive_the_loss_of_a_replica(service: Served) -> None:
    lost: list[int] = []

    def lose() -> None:
        lost.append(engine(service))
        os.kill(replica(service), signal.SIGKILL)

    await changed(service, lose)
    await asyncio.to_thread(wait_for_exit, lost[0])


async def test_streams_move_off_a_replica_that_is_drained(service: Served) -> None:
    def scale_in() -> None:
        service.scale("0", 1)
        service.until(lambda: ready(service) == 1, "one replica is left")

    async with client(service) as api:
        undisturbed = await all_kinds(api)
        assert await all_kinds(api, scale_in) == undisturbed
    service.scale("0", 2)
    service.until(lambda: ready(service) == 2, "two replicas are ready")


async def test_streams_survive_an_update(service: Served) -> None:
    def update() -> None:
        model = service.spec["models"]["m"]
        model["version"], model["engine_args"] = "2", {"block_size": 32}
        service.update(yaml.safe_dump(service.spec, sort_keys=False))

    await changed(service, update)


def test_no_engine_is_left_when_the_service_exits(service: Served) -> None:
    engines = [
        pid
        for process in service.status().processes
        if process.pid and process.model
        for pid in family_of(process.pid)
        if is_engine(pid)
    ]
    assert len(engines) == 6
    service.end()
    service.wait_gone()
    for pid in engines:
        wait_for_exit(pid)
