"""Locks of one user on one host."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from multiworld.serve.engine.external import host_locks
from multiworld.serve.engine.external.host_locks import all_locked, host_lock


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own locks, and poll often."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(host_locks, "POLL_S", 0.01)


def is_free(name: str) -> bool:
    if (lock := host_lock("test", name)) is None:
        return False
    os.close(lock)
    return True


async def test_one_at_a_time_has_a_lock() -> None:
    inside: list[str] = []
    most = {"a": 0, "b": 0, "MIG/1": 0}

    async def hold(*names: str) -> None:
        async with all_locked("test", names):
            inside.extend(names)
            for name in names:
                most[name] = max(most[name], inside.count(name))
                assert not is_free(name)
            await asyncio.sleep(0.02)
            for name in names:
                inside.remove(name)

    async with asyncio.timeout(60):
        pairs = [("a", "b"), ("b", "a"), ("a", "a"), ("MIG/1",), ("b", "MIG/1"), ()]
        await asyncio.gather(*(hold(*dict.fromkeys(names)) for names in pairs))
    assert set(most.values()) == {1}


async def test_folder_of_somebody_else_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is locked in that case."""
    (tmp_path / f"multiworld-test-{os.getuid()}").write_text("no folder")
    async with all_locked("test", ["a"]):
        assert "test are not locked" in caplog.text


async def test_who_gives_up_holds_nothing() -> None:
    async with asyncio.timeout(60):
        async with all_locked("test", ["b"]):
            waiting = asyncio.ensure_future(all_locked("test", "ab").__aenter__())
            while is_free("a"):  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert is_free("a")
        assert is_free("b")
