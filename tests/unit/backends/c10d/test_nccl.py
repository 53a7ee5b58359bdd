"""The code around NCCL, tested with a fake; ``tests/gpu`` tests it with NCCL itself."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from multiworld import UnsupportedOperationError
from multiworld.backends import torch_names
from multiworld.backends.c10d import groups, nccl
from multiworld.backends.c10d.gloo_reduction import Reduction

DEVICE = torch.device("cuda", 1)


class FakeNccl:
    """Records its calls, and the environment that it was made in."""

    made: list[FakeNccl] = []  # noqa: RUF012 - emptied by the fixture

    class Options:
        """The part of torch's options that is used."""

        def __init__(self) -> None:
            self._timeout: Any = None
            self.config = type("Config", (), {"blocking": 1})()

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.options, self.calls = options, list[str]()
        self.environment = {name: os.environ.get(name) for name in nccl.QUIET}
        self.barrier: threading.Barrier | None = None
        FakeNccl.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(f"connect {device}")

    def abort(self) -> None:
        """Return only once all groups of the barrier are being aborted."""
        if self.barrier is not None:
            self.barrier.wait(timeout=10)
        self.calls.append("abort")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class FakeStore:
    def __init__(self) -> None:
        self.seen: dict[str, bytes] = {}

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FakeNccl.made.clear()
    monkeypatch.setattr(torch_names, "nccl_class", lambda: FakeNccl)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    yield
    FakeNccl.made.clear()


def group(soon: list[Callable[[], Any]]) -> groups.Group:
    """Return a connected group that schedules its calls in ``soon``."""
    made = groups.Group("nccl", FakeStore(), DEVICE, soon.append)  # type: ignore[arg-type]
    made.make(0, 2, "127.0.0.1", 60)
    return made


def test_torchs_watchdog_is_off_only_while_a_group_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(name, "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    group([])
    (made,) = FakeNccl.made
    assert made.environment == nccl.QUIET
    assert os.environ[name] == "3"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


def test_communicators_are_non_blocking_and_eager() -> None:
    """A dead peer then fails the join, and no call hangs inside NCCL."""
    group([])
    (made,) = FakeNccl.made
    assert made.options.config.blocking == 0
    assert made.options._timeout.total_seconds() == 60
    assert made.calls == ["connect cuda:1"]


def test_groups_that_break_together_are_aborted_together() -> None:
    """All abort flags must be set before an abort waits for the others' kernels."""
    soon: list[Callable[[], Any]] = []
    broken, healthy = [group(soon) for _ in range(3)], group(soon)
    barrier = threading.Barrier(3)
    for native in FakeNccl.made[:3]:
        native.barrier = barrier
    for one in broken:
        one.cut()
    assert not any("abort" in native.calls for native in FakeNccl.made)
    threads = [thread for call in soon for thread in call()]
    for thread in threads:
        thread.join(10)
    assert [("abort" in native.calls) for native in FakeNccl.made] == [True] * 3 + [
        False
    ]
    assert healthy.native is FakeNccl.made[3]


@pytest.mark.parametrize("is_broken", [True, False])
def test_aborted_group_is_never_shut_down(is_broken: bool) -> None:
    """``shutdown`` hangs after an abort."""
    soon: list[Callable[[], Any]] = []
    one = group(soon)
    if is_broken:
        one.cut()
        for call in soon:
            for thread in call():
                thread.join(10)
    done = threading.Event()
    one.drop(done.set)
    assert done.wait(10)
    assert ("shutdown" in FakeNccl.made[0].calls) is not is_broken


def test_two_worlds_connect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may wait for a member that connects the other one first."""
    both = threading.Barrier(2)
    monkeypatch.setattr(
        FakeNccl,
        "eager_connect_single_device",
        lambda self, device: both.wait(timeout=10),
    )
    threads = [threading.Thread(target=group, args=([],)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not both.broken


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_bitwise_reduction_is_refused_before_anything_is_sent(
    dtype: torch.dtype,
) -> None:
    """Torch would raise its error in the middle of it."""
    like = torch.zeros(2, dtype=dtype)
    with pytest.raises(UnsupportedOperationError, match="NCCL cannot reduce"):
        Reduction(like, ReduceOp(ReduceOp.BXOR), 2, "nccl")
    Reduction(like, ReduceOp(ReduceOp.BXOR), 2, "gloo")
    Reduction(like, ReduceOp(ReduceOp.MAX), 2, "nccl")
