"""Helper processes that start, talk, hang, break off and exit."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from multiworld.errors import LaunchError
from multiworld.serve.controller.launchers import helper_process
from multiworld.serve.controller.launchers.base import began_at
from multiworld.serve.controller.launchers.helper_process import HelperProcess
from multiworld.serve.controller.launchers.protocol import (
    FORK_NEWS,
    Exited,
    ForkNews,
    Launch,
    Warm,
    encode,
)
from tests.unit.serve.edges import HANG_S

MODULE = "tests.unit.serve.controller.launchers.helpers"


class Helper:
    def __init__(self, log: Path) -> None:
        self.log = log
        self.news: list[ForkNews] = []
        self.heard, self.has_ended = asyncio.Event(), asyncio.Event()
        self.hangs = 0
        self.process = self.made()

    def made(self, *, is_replaceable: bool = True) -> HelperProcess[ForkNews]:
        return HelperProcess(
            MODULE,
            self.log,
            FORK_NEWS,
            self._told,
            self._ended,
            self._hangs,
            is_replaceable=is_replaceable,
        )

    def _hangs(self) -> None:
        self.hangs += 1
        self.heard.set()

    def _told(self, news: ForkNews) -> None:
        self.news.append(news)
        self.heard.set()

    def _ended(self) -> None:
        self.has_ended.set()
        self.heard.set()

    async def start(self, word: str, limit_s: float = HANG_S) -> ForkNews:
        env = {"WORD": "said ", "PYTHONPATH": os.pathsep.join(_paths())}
        return await self.process.start([word], env, limit_s)


def _paths() -> list[str]:
    root = Path(__file__).parents[5]
    return [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]


@pytest.fixture
async def helper(tmp_path: Path) -> AsyncIterator[Helper]:
    made = Helper(tmp_path / "log")
    yield made
    await made.process.close()


def order(name: str) -> Launch:
    return Launch(name, "{}", "/dev/null", {})


async def wait(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), HANG_S)


async def test_helper_reports_that_it_is_ready_and_receives_orders(
    helper: Helper,
) -> None:
    assert not helper.process.is_running
    first = await helper.start("listens")
    assert isinstance(first, Warm)
    assert helper.process.is_running
    helper.process.send(order("a"))
    await wait(helper.heard)
    (news,) = helper.news
    assert isinstance(news, Exited)
    assert news.name.startswith("said ")
    assert msgspec.json.decode(news.name.removeprefix("said ").encode())["name"] == "a"
    assert not helper.has_ended.is_set()


@pytest.mark.parametrize(("word", "limit_s"), [("ends", HANG_S), ("hangs", 0.5)])
async def test_helper_that_does_not_become_ready_is_an_error(
    helper: Helper, word: str, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[asyncio.subprocess.Process] = []
    create = asyncio.create_subprocess_exec

    async def noted(*args: Any, **more: Any) -> asyncio.subprocess.Process:
        started.append(await create(*args, **more))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    with pytest.raises(LaunchError, match=r"did not start; see .*log"):
        await helper.start(word, limit_s)
    assert not helper.process.is_running
    (process,) = started
    assert process.returncode is not None
    if word == "ends":
        assert helper.log.read_text() == "why it ended\n"


@pytest.mark.parametrize("word", ["breaks off", "talks"])
async def test_helper_that_talks_nonsense_counts_as_ended(
    helper: Helper, word: str
) -> None:
    """Callers that wait for its messages would wait forever."""
    await helper.start(word)
    await wait(helper.has_ended)
    assert not helper.process.is_running
    assert helper.news == []


async def test_helper_that_exits_is_reported_once_and_can_be_restarted(
    helper: Helper,
) -> None:
    """Orders sent while it is down are lost."""
    await helper.start("listens")
    helper.process.send(order("end now"))
    await wait(helper.has_ended)
    assert len(helper.news) == 1
    assert not helper.process.is_running
    helper.process.send(order("lost"))
    helper.heard.clear()
    await helper.start("listens")
    helper.process.send(order("b"))
    await wait(helper.heard)
    assert len(helper.news) == 2


@pytest.mark.parametrize("word", ["listens", "stays"])
async def test_close_ends_it_whatever_it_does(helper: Helper, word: str) -> None:
    """It closes the socket, then kills a helper that does not react."""
    first = await helper.start(word)
    assert isinstance(first, Warm)
    await asyncio.wait_for(helper.process.close(limit_s=0.2), HANG_S)
    assert began_at(first.pid) is None
    await helper.process.close()
    assert not helper.has_ended.is_set()


async def test_line_that_is_too_long_counts_as_the_end(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "multiworld.serve.controller.launchers.helper_process.LINE", 1000
    )
    await helper.start("listens")
    helper.process.send(order("x" * 3000))
    await wait(helper.has_ended)
    assert helper.news == []


def test_lines_are_read_as_they_were_written() -> None:
    message = Exited("a\nb", None)
    line = encode(message)
    assert line.count(b"\n") == 1
    assert FORK_NEWS.decode(line) == message
    for bad in (b"", b"{}", b'{"kind": "Vanish"}', b"[]", line[:-3]):
        with pytest.raises(ValueError, match=r"."):
            FORK_NEWS.decode(bad)


# Helpers that hang.


@pytest.fixture
def _quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_process, "PING_S", 0.05)


@pytest.mark.usefixtures("_quick_pings")
async def test_stopped_helper_is_named_and_killed(
    helper: Helper, caplog: pytest.LogCaptureFixture
) -> None:
    first = await helper.start("listens")
    assert isinstance(first, Warm)
    await asyncio.sleep(0.5)  # longer than a hang takes to be noticed
    assert (helper.hangs, helper.process.is_running) == (0, True)
    os.kill(first.pid, signal.SIGSTOP)
    await wait(helper.has_ended)
    assert helper.hangs == 1
    assert f"(process {first.pid}) has not answered" in caplog.text
    assert isinstance(await helper.start("listens"), Warm)


@pytest.mark.usefixtures("_quick_pings")
async def test_helper_that_does_not_answer_though_it_runs_hangs_too(
    helper: Helper,
) -> None:
    """It may be in an endless loop or wait for a lock."""
    await helper.start("is deaf")
    await wait(helper.has_ended)
    assert helper.hangs == 1


@pytest.mark.usefixtures("_quick_pings")
async def test_helper_that_others_depend_on_is_named_and_left_alone(
    helper: Helper,
) -> None:
    helper.process = helper.made(is_replaceable=False)
    first = await helper.start("listens")
    assert isinstance(first, Warm)
    os.kill(first.pid, signal.SIGSTOP)
    await wait(helper.heard)
    assert (helper.hangs, helper.has_ended.is_set()) == (1, False)
    os.kill(first.pid, signal.SIGCONT)
    helper.heard.clear()
    helper.process.send(order("a"))
    await wait(helper.heard)
    assert helper.news
