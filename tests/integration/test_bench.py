"""Suites of ``python -m benchmarks``: each measures every contender."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import members
from benchmarks.members import Options
from benchmarks.runner import SUITES
from benchmarks.suites import graphs, nccl
from multiworld.serve.engine.compute.transfers import HOST

pytestmark = pytest.mark.timeout(200)


def bench(*words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "benchmarks", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == code, done.stderr[-2000:]
    return done.stdout if code == 0 else done.stderr


QUICK = ("--quick", "--rounds", "1")
EXPECTED: dict[str, dict[str, int]] = {
    "p2p": {"world, direct": 6, "plain gloo": 4, "memcpy": 2, "unwatched": 6},
    "watching": {"watched": 4, "unwatched": 4},
    "many": {"to create": 2, "beside": 2, "processor": 2},
    "joining": {"nothing else": 4, "join and leave": 4, "join and break": 4},
    "fan": {"1 world": 4, "8 worlds": 4},
    "collectives": {"plain gloo": 18, "world, direct": 18, "world, gloo": 18},
    "serving": {"three stages": 12, "one stage": 12, "gateway": 1, "whole service": 2},
}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    [
        name if name == "p2p" else pytest.param(name, marks=pytest.mark.heavy)
        for name in EXPECTED
    ],
)
def test_suite_measures_every_contender(name: str, tmp_path: Path) -> None:
    bench(name, *QUICK, "--out", str(tmp_path))
    found: dict[str, Any] = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["suite"] == name
    assert found["machine"]
    for contender, count in EXPECTED[name].items():
        series = [s for s in found["series"] if s["contender"] == contender]
        assert len(series) == count, (contender, series)
        assert all(len(s["samples"]) >= 1 for s in series)
        if name == "p2p":
            assert all(s["median"] > 0 for s in series)


def test_unknown_suite_is_named() -> None:
    text = bench("nothing", code=1)
    assert all(name in text for name in ("nothing", *SUITES))


@pytest.mark.heavy
def test_gpu_suite_measures_on_any_backend() -> None:
    found: list[Any] = []
    options = Options(1, is_quick=True, ports=members.free_ports(3))
    members.run(nccl.on_hosts, nccl.SIZE, options, found.append)
    samples = [what for kind, what in found if kind == "sample"]
    assert {sample[2] for sample in samples} == {nccl.PLAIN, nccl.OURS, nccl.UNWATCHED}
    assert len(samples) == 12
    assert all(sample[4] > 0 for sample in samples)


def test_steps_of_a_gpu_are_measured_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "LAYERS", (1,))
    sizes = {**graphs.SIZES, "vocab_size": 300, "hidden_size": 64}
    sizes |= {"intermediate_size": 64, "head_dim": 16}
    found: list[Any] = []
    graphs.measure(
        Options(1, is_quick=True), found.append, HOST, lambda call: call, sizes
    )
    samples = [what for kind, what in found if kind == "sample"]
    assert [sample[2] for sample in samples] == [graphs.EACH, graphs.GRAPHS] * 2
    assert all(sample[4] > 0 for sample in samples)


@pytest.mark.heavy
def test_data_path_is_measured_without_what_serving_needs() -> None:
    """The serving suite names the missing package; the other suites do not need it."""
    program = (
        "import sys\n"
        "sys.modules['aiohttp'] = sys.modules['yaml'] = None\n"
        "from benchmarks.members import Options\n"
        "from benchmarks.runner import run_suite\n"
        "run_suite('serving', Options(1, True), lambda *_: None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "RuntimeError: aiohttp is not installed: pip install" in done.stderr
