"""Streams that are moved ahead of time, which their clients do not notice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from tests.serve.harness import WAIT_S, Served, served
from tests.serve.texts import Stream, client, spec_of
from tests.tiers import some
from tests.tiny_decoder import save_decoder

pytestmark = pytest.mark.timeout(240)

LONG = 230
LIMIT_S = 10.0
ROUNDS = 4  # of a change that finds a stream to move unless all just began or end


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = save_decoder(tmp_path_factory.mktemp("decoder"))
    with served(tmp_path_factory.mktemp("moves"), spec_of(folder)) as made:
        yield made


def moved_and_replayed(service: Served) -> tuple[float, float]:
    """Return the number of moved streams, and of those that made another attempt."""
    found = dict.fromkeys(("moved", "replayed"), 0.0)
    text = httpx.get(f"{service.url}/metrics", timeout=WAIT_S).text
    for line in text.splitlines():
        for kind in found:
            if line.startswith(f'multiworld_stream_events_total{{kind="{kind}"}}'):
                found[kind] = float(line.rsplit(" ", 1)[1])
    return found["moved"], found["replayed"]


async def flow(api: openai.AsyncOpenAI, pieces: list[str], end: asyncio.Event) -> None:
    while not end.is_set():
        assert await Stream(api, len(pieces)).end() == pieces


async def moves(service: Served, change: Callable[[], object]) -> int:
    """Call ``change`` while streams run; return how many of them were moved."""
    moved, replayed = await asyncio.to_thread(moved_and_replayed, service)
    end = asyncio.Event()
    async with client(service) as api, asyncio.TaskGroup() as group:
        pieces = await Stream(api, LONG).end()
        for _ in range(3):
            group.create_task(flow(api, pieces, end))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(change)
        end.set()
    found, again = await asyncio.to_thread(moved_and_replayed, service)
    assert again == replayed, "streams were not moved, but replayed"
    return int(found - moved)


async def test_streams_move_when_a_stage_shrinks_and_grows(service: Served) -> None:
    def shrink() -> None:
        service.scale("middle", 1)
        service.until(lambda: service.stages() == [1, 1, 1], "shrunk")

    def grow() -> None:
        service.scale("middle", 2)
        service.until(lambda: service.stages() == [1, 2, 1], "grown")

    moved = {shrink: 0, grow: 0}
    for _ in range(ROUNDS):
        for change in moved:
            moved[change] += await moves(service, change)
        if all(moved.values()):
            return
    pytest.fail(f"streams did not move: {list(moved.values())}")


async def test_streams_move_to_a_new_version_with_the_same_weights(
    service: Served,
) -> None:
    """The old version is gone before the streams would have completed there."""

    def update() -> None:
        model = service.spec["models"]["m"]
        model["version"] = wanted = model.get("version", "1") + ".1"
        service.update(yaml.safe_dump(service.spec, sort_keys=False))

        def is_new() -> bool:
            versions = {p.version for p in service.status().processes if p.model}
            return versions == {wanted}

        service.until(is_new, "updated")

    assert await moves(service, update) >= 1


@pytest.mark.parametrize("drain_s", some([0.3, 60.0], 1))
async def test_streams_of_other_weights_end_on_the_old_version_while_it_drains(
    tmp_path: Path, drain_s: float
) -> None:
    """New streams use the new version; after ``drain_s``, old ones move there."""
    folders = [
        save_decoder(tmp_path / f"{width}", intermediate_size=width)
        for width in (64, 80)
    ]
    spec = spec_of(folders[0]) | {"drain_s": drain_s}
    with served(tmp_path / "service", spec) as service:
        async with client(service) as api:
            old_text = await Stream(api, LONG).end()
            old = [Stream(api, LONG) for _ in range(8)]
            for stream in old:
                await stream.has(3)
            spec["models"]["m"] |= {"path": str(folders[1]), "version": "2"}
            service.update(yaml.safe_dump(spec, sort_keys=False))
            found = [await stream.end() for stream in old]
            new_text = old_text
            async with asyncio.timeout(WAIT_S):
                while new_text[0] == old_text[0]:  # it is not active yet
                    new_text = await Stream(api, LONG).end()
            assert await Stream(api, LONG).end() == new_text
    for pieces in found:
        assert len(pieces) == LONG
        assert pieces[:3] == old_text[:3]
    if drain_s > LIMIT_S:
        assert found == [old_text] * 8


@pytest.mark.heavy
async def test_streams_survive_repeated_loss_of_all_replicas(
    service: Served,
) -> None:
    """All replicas are lost at once, and no request is marked as poison."""
    async with client(service) as api:
        pieces = await Stream(api, LONG).end()
        streams = [Stream(api, LONG) for _ in range(4)]
        for stream in streams:
            await stream.has(5)
        for _ in range(5):
            there = [p.pid for p in service.status().processes if p.model and p.pid]
            for pid in there:
                os.kill(pid, signal.SIGKILL)

            def is_new(gone: Sequence[int] = there) -> bool:
                known = [p.pid for p in service.status().processes if p.model]
                return len(known) == 4 and not {*known} & {*gone}

            await asyncio.to_thread(service.until, is_new, "replaced")
        for stream in streams:
            assert await stream.end() == pieces
