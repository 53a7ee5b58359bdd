"""The chat demo, from start to report."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from multiworld.demo import smollm2
from multiworld.demo.chats.background_load import under_load
from multiworld.demo.chats.chats import Chat, Chats
from multiworld.demo.chats.check import Verdict, check
from multiworld.demo.chats.picture import draw
from multiworld.demo.chats.screen import ChatScreen, pause_table
from multiworld.demo.chats.story import Story
from multiworld.errors import ServeError

SPEC = Path(__file__).parent / "app.yaml"
MODEL = "smollm2"  # name of the model in the spec
AT_ONCE = 8  # chats that stream at once


def run(tokens: int, pause_s: float, picture: Path, *, as_json: bool) -> int:
    """Run the demo; return 1 if a stream was cut or differs from an undisturbed run."""
    console = Console(stderr=as_json)
    folder = smollm2.fetch(console.print)
    root = Path(tempfile.mkdtemp(prefix="multiworld-demo-"))
    spec = root / "app.yaml"
    spec.write_text(SPEC.read_text().replace("SMOLLM2", json.dumps(str(folder)), 1))
    screen = ChatScreen(console)
    story = Story(spec, root, screen.tell, MODEL)
    try:
        chats = asyncio.run(_play(story, screen, tokens, pause_s))
    except ServeError:
        console.print(f"the logs of the service are in {root}", soft_wrap=True)
        raise
    except BaseException:  # on Ctrl-C, for example, nobody needs the logs
        shutil.rmtree(root, ignore_errors=True)
        raise
    what = "comparing every token with the undisturbed model …"
    if not console.is_terminal:
        console.print(what)  # a status line shows nothing without a terminal
    with console.status(what) as status:
        verdict = check(
            folder,
            chats,
            lambda done: status.update(f"compared {done} of {len(chats)} chats …"),
        )
    outcome = _report(console, story, chats, verdict, picture)
    shutil.rmtree(root, ignore_errors=True)
    if as_json:
        click.echo(json.dumps(outcome, indent=2))
    return 0 if outcome["is_good"] else 1


async def _play(
    story: Story, screen: ChatScreen, tokens: int, pause_s: float
) -> list[Chat]:
    try:
        screen.tell("starting the service: three stages, two replicas of the middle …")
        url = await story.start()
        screen.tell(f"[green]ready[/] at {url}; {AT_ONCE} chats stream at once")
        chats = Chats(url, MODEL, AT_ONCE, tokens)
        beside = story.watch(chats), screen.show(story, chats)
        try:
            async with under_load(chats, *beside):
                await story.break_every_stage(pause_s)
                screen.tell("waiting for the last chats …")
        finally:
            screen.finish()
    finally:
        await story.end()
    return chats.all


def _report(
    console: Console, story: Story, chats: list[Chat], verdict: Verdict, picture: Path
) -> dict[str, Any]:
    gaps = [
        after - before
        for chat in chats
        for before, after in itertools.pairwise(chat.times[1:])
    ]
    usual_s = statistics.median(gaps) if gaps else 0.0
    console.print(pause_table(story.scenes, chats, usual_s))
    tokens = sum(len(chat.tokens) for chat in chats)
    complete = sum(bool(chat.finish) for chat in chats)
    console.print(
        f"streams: {len(chats)} started, {complete} complete, "
        f"{len(chats) - complete} cut · {tokens} tokens, {verdict.wrong} that the "
        f"undisturbed model would not choose · {verdict.equal} streams equal an "
        "undisturbed run to the last token"
    )
    for line in verdict.broken:
        console.print(f"[red]{line}[/]", markup=True, highlight=False)
    draw(picture, chats, story)
    console.print(f"picture drawn to {os.fspath(picture)}", soft_wrap=True)
    is_good = complete == verdict.equal == len(chats) and not verdict.wrong
    if is_good:
        console.print("[green]no stream was cut, and no token was changed[/]")
    return {
        "is_good": is_good,
        "streams": len(chats),
        "complete": complete,
        "tokens": tokens,
        **dataclasses.asdict(verdict),
        "scenes": [dataclasses.asdict(scene) for scene in story.scenes],
        "picture": str(picture),
    }
