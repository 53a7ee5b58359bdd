"""Examples, each run with one command, with and without a kill, and by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "common")
STEPPED = [n for n in NAMES if n not in ("ddp", "join_later", "single_world")]


def run(name: str, *args: object, limit_s: float = 50) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_there() -> None:
    wanted = "send_recv single_world resnet broadcast reduce all_reduce all_gather"
    wanted += " gather scatter join_later ddp"
    assert set(NAMES) == set(wanted.split())


USUAL = ("send_recv",)


@pytest.mark.parametrize(
    "name",
    [
        name if name in USUAL else pytest.param(name, marks=pytest.mark.heavy)
        for name in STEPPED
    ],
)
def test_example_when_killed_then_only_its_world_stops(name: str) -> None:
    output = run(name, "--kill", "--steps", 40)
    assert "[world1 rank 0] all 40 steps done" in output
    assert "world2 broken: rank 1 was lost" in output


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    [
        "all_reduce",
        pytest.param("send_recv", marks=pytest.mark.heavy),
        pytest.param("gather", marks=pytest.mark.heavy),
    ],
)
def test_example_on_gloo_with_three_members(name: str) -> None:
    output = run(name, "--backend", "gloo", "--size", 3, "--steps", 20)
    for member in ("world1 rank 0", "world1 rank 2", "world2 rank 1"):
        assert f"[{member}] all 20 steps done" in output


@pytest.mark.heavy
def test_example_by_hand() -> None:
    """By hand: one command for each member."""
    address = f"127.0.0.1:{free_port()}"
    program = str(EXAMPLES / "send_recv.py")
    command = [sys.executable, program, "--addr", address]
    members = [
        subprocess.Popen(
            [*command, "--steps", "20", *worlds],
            stdout=subprocess.PIPE,
            text=True,
        )
        for worlds in (
            ("--world", "2:1"),
            ("--world", "1:1"),
            ("--world", "1:0", "--world", "2:0"),
        )
    ]
    try:
        outputs = [member.communicate(timeout=50)[0] for member in members]
    finally:
        for member in members:
            member.kill()
            member.wait()
    assert [member.returncode for member in members] == [0, 0, 0], outputs
    assert "[world2 rank 0] all 20 steps done" in outputs[2]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "args",
    [pytest.param((), marks=pytest.mark.heavy), ("--kill",)],
    ids=["whole", "kill"],
)
def test_join_later_reports_the_gaps(args: tuple[str, ...]) -> None:
    output = run("join_later", *args, "--steps", 40)
    for phase in ("before", "while joining", "after"):
        assert f"world1 {phase}:" in output
    assert ("world2 broken: rank 1 was lost" in output) == bool(args)


@pytest.mark.heavy
def test_single_world_shows_that_one_failure_stops_all() -> None:
    """In plain torch.distributed, one failure stops every member."""
    assert "3 of 3 members took all steps" in run("single_world", "--steps", 20)
    assert "0 of 3 members took all steps" in run("single_world", "--kill")


def test_ddp_names_the_lost_member_and_continues() -> None:
    output = run("ddp")
    assert output.count("rank 2 was lost") == 2
    assert output.count("continues in a world of 2") == 2
    assert output.count("20 steps, equal weights: True") == 2
