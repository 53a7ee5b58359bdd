"""Processes whose device can compute nothing any more."""

from __future__ import annotations

import os

import pytest
import torch

from multiworld.serve.engine.compute.device_health import EXIT_BROKEN, exit_if_broken
from multiworld.serve.replica.batches import executor
from multiworld.serve.replica.batches.batch_queue import Work
from multiworld.serve.replica.batches.executor import Executor
from multiworld.serve.spec.stage import Stage, StageContext, Tensors

ASSERT = RuntimeError("CUDA error: device-side assert triggered")


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(os, "_exit", found.append)
    return found


def breaks(device: object) -> None:
    assert str(device) == "cuda:3", "not another replica's"
    raise ASSERT


@pytest.mark.parametrize("is_broken", [True, False])
def test_process_exits_if_its_device_fails_again(
    exits: list[int], monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    works = breaks if is_broken else lambda device: None
    monkeypatch.setattr(torch.accelerator, "synchronize", works)
    exit_if_broken(torch.device("cuda", 3), ASSERT)
    assert exits == ([EXIT_BROKEN] if is_broken else [])


def test_lack_of_memory_and_errors_on_a_cpu_break_nothing(
    exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", breaks)
    exit_if_broken("cuda:3", torch.OutOfMemoryError("too little"))
    exit_if_broken("cpu", ASSERT)
    exit_if_broken(torch.device("cpu"), ASSERT)
    assert exits == []


async def test_each_failed_batch_is_a_reason_to_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[tuple[object, BaseException]] = []
    monkeypatch.setattr(executor, "exit_if_broken", lambda *given: looks.append(given))

    def fails(tensors: Tensors) -> Tensors:
        raise ASSERT

    made = Executor(Stage(load=lambda context: fails), "s", 1)
    try:
        await made.load(StageContext())
        content = {"x": torch.ones(1)}
        work = Work(("g", 1, 1), "x", 1, 1e9, 0.0, content=content)
        await made.run([work])
    finally:
        made.close()
    assert looks == [("cpu", ASSERT)]
