"""Puts the demo together."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import torch
from rich.console import Console

from multiworld.demo.worlds.leader import DemoOutcome, Leader
from multiworld.demo.worlds.model import load_digits, trained_weights
from multiworld.demo.worlds.screen import show, summary, tell


def run(backend: str, phase_s: float, *, as_json: bool) -> int:
    """Run the demo, print what happened, and return the exit code."""
    console = Console(stderr=as_json)
    training, test = load_digits()
    console.print("a ResNet for scikit-learn's handwritten digits: ", end="")
    weights, was_trained = trained_weights(training)
    how = "trained just now, kept in" if was_trained else "weights from"
    console.print(f"{how} {weights}", highlight=False, soft_wrap=True)
    torch.set_num_threads(1)

    async def scene() -> DemoOutcome:
        leader = Leader(
            test, weights, backend, phase_s, lambda text: tell(leader, console, text)
        )
        showing = asyncio.create_task(show(leader, console))
        try:
            return await leader.run()
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)

    outcome = asyncio.run(scene())
    if as_json:
        print(json.dumps(asdict(outcome), indent=2))  # noqa: T201 - the command's output
    else:
        console.print(summary(outcome))
        for failure in outcome.failures:
            console.print(f"[red]did not hold:[/] {failure}")
        if not outcome.failures:
            console.print("[green]everything that was promised held[/]")
    return 1 if outcome.failures else 0
