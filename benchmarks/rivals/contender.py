"""Contender whose two ends are processes of another environment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

from torch import Tensor

from benchmarks.rivals.environment import HERE, RIVALS, python_of


class Apart:
    """One end of the connection: a process that receives its orders over a pipe."""

    # All methods raise RuntimeError if the process has exited.

    def __init__(self, name: str, folder: Path, rank: int, port: int) -> None:
        self._name = name
        self._is_spinning = RIVALS[name].is_spinning
        script = HERE / RIVALS[name].script
        # Do not pass on Python's variables: one contender has our package's name, and
        # would import our package instead of its own.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self._process = subprocess.Popen(
            [str(python_of(name, folder)), str(script), str(rank), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**kept, "OMP_NUM_THREADS": "1"},
        )

    def wait_ready(self) -> None:
        """Wait until both ends are connected."""
        self._expect("ready")
        self._signal(signal.SIGSTOP)

    def send_many(self, tensor: Tensor, count: int) -> None:
        self._order("send", tensor, count)

    def recv_many(self, out: Tensor | None, count: int) -> None:
        """Receive ``count`` messages of the size of ``out``, which stays unchanged."""
        if out is None:
            raise NotImplementedError("this contender needs a tensor to receive into")
        self._order("recv", out, count)

    def ping(self, tensor: Tensor, count: int, *, is_first: bool) -> None:
        self._order("ping", tensor, count, is_first=is_first)

    def _order(
        self, op: str, tensor: Tensor, count: int, *, is_first: bool = False
    ) -> None:
        order = {"op": op, "size": tensor.nbytes, "count": count, "is_first": is_first}
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RuntimeError(f"the process of {self._name} has exited") from error
        self._expect("done")
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if self._is_spinning:
            self._process.send_signal(number)

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if line != word:
            raise RuntimeError(f"the process of {self._name} failed: {line!r}")

    def close(self) -> None:
        """Close the pipe; kill the process if it does not exit within ten seconds."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
