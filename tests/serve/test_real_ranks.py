"""A vLLM replica with three tensor-parallel ranks on CPUs, one of which is killed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiworld.serve.machines.usage import family_of
from tests.serve.harness import Served, served
from tests.serve.test_engines import Text
from tests.serve.test_real_engines import COUNT, KINDS, all_kinds, model_of_vllm
from tests.serve.texts import client

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1800)]

RANKS = 3  # SmolLM2 has nine heads


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    args = {"tensor_parallel_size": RANKS, "enforce_eager": True}
    model = model_of_vllm(engine_args=args, replicas=1, deadline_s=600.0)
    spec = {"app": "ranks", "models": {"m": model}, "gateway": {"port": 0}}
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(cores[rank % len(cores)]) for rank in range(RANKS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound)
        with served(tmp_path_factory.mktemp("ranks"), spec) as made:
            yield made


def ranks(service: Served) -> list[int]:
    """Return the processes of vLLM's workers, which compute."""
    found = [p for p in service.status().processes if p.name.startswith("m/")]
    replica = next(p.pid for p in found if p.phase == "ready")
    assert replica
    commands = {p: Path(f"/proc/{p}/cmdline").read_bytes() for p in family_of(replica)}
    return sorted(p for p, text in commands.items() if b"vllm::worker" in text.lower())


async def test_streams_survive_the_loss_of_a_rank(service: Served) -> None:
    """The first rank samples for all; the streams continue in the next replica."""
    draw = random.Random(1)
    async with client(service) as api:
        undisturbed = await all_kinds(api, service, draw)
        assert await all_kinds(api, service, draw) == undisturbed
        texts = {name: Text(api, kind, COUNT) for name, kind in KINDS.items()}
        await texts["greedy"].has(draw.randrange(1, COUNT - 1))
        found = ranks(service)
        assert len(found) == RANKS
        os.kill(found[-1], signal.SIGKILL)
        assert {name: await text.end() for name, text in texts.items()} == undisturbed
