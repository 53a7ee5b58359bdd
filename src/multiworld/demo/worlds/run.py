"""Runs the worlds demo from start to report."""

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
    """Run the demo, and print the outcome.

    Args:
        backend: Backend of the worlds.
        phase_s: Seconds of traffic before the kill and after the replacement.
        as_json: Print the outcome as JSON, and everything else to standard error.

    Returns:
        The exit code: 1 if a promise did not hold.
    """
    console = Console(stderr=as_json)
    training, test = load_digits()
    console.print("ResNet for scikit-learn's handwritten digits: ", end="")
    weights, was_trained = trained_weights(training)
    how = "trained now, weights saved to" if was_trained else "weights from"
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
            console.print(f"[red]promise broken:[/] {failure}")
        if not outcome.failures:
            console.print("[green]every promise held[/]")
    return 1 if outcome.failures else 0
