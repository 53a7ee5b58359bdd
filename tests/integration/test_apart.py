"""Contenders of the benchmark that need an environment of their own."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from benchmarks.contenders import stream
from benchmarks.members import free_ports
from benchmarks.rivals import contender, environment
from benchmarks.rivals.contender import Apart
from benchmarks.rivals.environment import Rival
from tests.recorded import recorded

END = f"""
import sys
sys.path.insert(0, {str(environment.HERE)!r})
import ends

class Plain:
    async def connect(self, rank, port):
        print("a library that prints")
        self.sock = ends.meet(rank, port)
    async def prepare(self, size):
        self.data = bytearray(size)
    async def send(self):
        self.sock.sendall(self.data)
    async def recv(self):
        view = memoryview(self.data)
        while view:
            count = self.sock.recv_into(view)
            if not count:
                raise ConnectionError
            view = view[count:]

if __name__ == "__main__":
    ends.serve(Plain())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "end.py").write_text(END)
    (tmp_path / "mute.py").write_text("raise SystemExit(3)")
    rivals = {
        "plain": Rival((), str(tmp_path / "end.py"), is_spinning=True),
        "mute": Rival((), str(tmp_path / "mute.py")),
    }
    for module in (environment, contender):
        monkeypatch.setattr(module, "RIVALS", rivals)
    for name in rivals:
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


def test_ends_of_a_contender_are_driven_and_timed(folder: Path) -> None:
    (port,) = free_ports(1)
    with recorded(subprocess, subprocess.Popen) as processes:
        ends = [Apart("plain", folder, rank, port) for rank in (0, 1)]
    took: dict[int, float] = {}

    def use(rank: int) -> None:
        end = ends[rank]
        end.wait_ready()
        end.ping(torch.zeros(1), 3, is_first=rank == 0)
        took[rank] = stream(rank, end, torch.zeros(100_000), 20)
        end.close()

    threads = [threading.Thread(target=use, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert sorted(took) == [0, 1]
    assert [process.returncode for process in processes] == [0, 0]


def test_end_that_exits_is_named(folder: Path) -> None:
    end = Apart("mute", folder, 0, free_ports(1)[0])
    with pytest.raises(RuntimeError, match="the process of mute"):
        end.wait_ready()
    end.close()


@pytest.mark.heavy
def test_failed_environment_names_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed installation names its step, and is not taken for complete."""
    steps = (("--no-index", "a-package-that-is-nowhere"),)
    monkeypatch.setattr(environment, "RIVALS", {"none": Rival(steps, "none.py")})
    with pytest.raises(RuntimeError, match="a-package-that-is-nowhere"):
        environment.install("none", tmp_path, lambda text: None)
    assert not (tmp_path / "none" / ".ready").exists()
