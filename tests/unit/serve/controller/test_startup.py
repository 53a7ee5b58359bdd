"""The times of a service's start."""

from __future__ import annotations

import time

import pytest

from multiworld.serve.controller.fleet.state import Process, ProcessPhase
from multiworld.serve.controller.startup import Startup, process_began


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_phases_follow_each_other_and_add_up() -> None:
    """The first process to join ends the phase before the replicas load."""
    clock = Clock()
    startup = Startup(8.0, clock)
    startup.end("to import torch")
    clock.now = 10.5
    startup.end("to start the store")
    clock.now = 16.0
    joined = [15.0, 14.0]
    startup.end_ready(
        Process(f"m/0/{at}", entered={ProcessPhase.JOINED: at}) for at in joined
    )
    assert str(startup) == (
        "8.0 s (2.0 s to import torch, 0.5 s to start the store, 3.5 s until a process "
        "ran, with the modules imported, 2.0 s to load and probe the replicas)"
    )


def test_processes_of_an_earlier_controller_started_before() -> None:
    clock = Clock()
    startup = Startup(8.0, clock)
    startup.end_ready([Process("m/0/1")])
    assert str(startup) == "2.0 s (2.0 s to load and probe the replicas)"


def test_this_process_has_begun() -> None:
    """The start time is on the monotonic clock."""
    began = process_began()
    assert began < time.monotonic()
    assert process_began() == pytest.approx(began, abs=0.5)


def test_end_of_each_phase_is_reported() -> None:
    clock, told = Clock(), list[str]()
    startup = Startup(8.0, clock, told.append)
    startup.end("to import torch")
    assert told == ["2.0 s to import torch"]
