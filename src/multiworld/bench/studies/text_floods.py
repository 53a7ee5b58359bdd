"""Study: time between tokens of one tenant beside another's flood of prompts. Shell.

``python -m multiworld.bench.studies.text_floods`` serves SmolLM2 in three stages. One
tenant reads a stream, first alone and then while another one sends long prompts, eight
at a time. Beside it, the time that one chunk of a prompt takes through all stages.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from multiworld.bench.serving.services import running
from multiworld.serve.control.answers import TenantWithKey
from multiworld.serve.control.client import Service
from multiworld.serve.load.summary import quantile
from multiworld.serve.models import smollm2

CHUNK, PROMPT, AT_ONCE, ANSWER = 256, 1500, 8, 64
"""Tokens of a step, tokens of a prompt of the flood, prompts at once, and tokens of the
stream."""


def spec_of(folder: Path) -> dict[str, Any]:
    """Return the spec of the service."""
    generation = {"dtype": "bfloat16", "max_num_batched_tokens": CHUNK}
    model = {
        "path": str(folder),
        "generation": {**generation, "enable_prefix_caching": False},
        "deadline_s": 300.0,
        "stages": [{"name": name} for name in ("front", "middle", "back")],
    }
    gateway = {"port": 0, "authentication": "keys"}
    return {"app": "floods", "models": {"m": model}, "gateway": gateway}


def _body(tokens: int, answer: int) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": [random.randrange(100, 40_000) for _ in range(tokens)],
        "max_tokens": answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


def _times(url: str, key: str, prompt: int, answer: int) -> list[float]:
    """Return the seconds from the request to each token of its answer."""
    headers = {"Authorization": f"Bearer {key}"}
    body, began = _body(prompt, answer), time.perf_counter()
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=300
    ) as got:
        return [
            time.perf_counter() - began
            for line in got.iter_lines()
            if line.startswith("data: {") and json.loads(line[6:]).get("choices")
        ]


def _gaps(url: str, key: str) -> list[float]:
    """Return the seconds between the tokens of a stream."""
    times = _times(url, key, 32, ANSWER)
    return [b - a for a, b in itertools.pairwise(times)]


@contextlib.contextmanager
def _flood(url: str, key: str) -> Iterator[None]:
    """Send long prompts, several at a time, until the end of the block."""
    is_over = threading.Event()
    headers = {"Authorization": f"Bearer {key}"}

    def send() -> None:
        while not is_over.is_set():
            body = {**_body(PROMPT, 1), "stream": False}
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(
                    f"{url}/v1/completions", json=body, headers=headers, timeout=300
                )

    threads = [threading.Thread(target=send) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    time.sleep(3.0)
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def main() -> None:
    """Run the study, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    console = Console(width=120)
    folder = smollm2.fetch(console.print)
    found: dict[str, list[float]] = {"alone": [], "beside a flood": [], "a chunk": []}
    with (
        tempfile.TemporaryDirectory() as name,
        running(spec_of(folder), Path(name)) as url,
    ):
        service = Service(None, Path(name) / "state")
        keys = [
            service.ask("POST", "/tenants", TenantWithKey, json={"name": who}).key
            for who in ("quiet", "loud")
        ]
        for _ in range(rounds):
            found["a chunk"] += _times(url, keys[0], CHUNK, 1)
            found["alone"] += _gaps(url, keys[0])
            with _flood(url, keys[1]):
                found["beside a flood"] += _gaps(url, keys[0])
    table = Table("ms between tokens", "p50", "p99", "longest", "tokens")
    for who, gaps in found.items():
        figures = statistics.median(gaps), quantile(gaps, 0.99), max(gaps)
        table.add_row(who, *(f"{1000 * s:.0f}" for s in figures), str(len(gaps)))
    console.print(table)


if __name__ == "__main__":
    main()
