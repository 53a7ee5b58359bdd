"""Common part of the examples: arguments, workers, and the loop around a step.

A process started without ``--world`` is the leader: rank 0 of world 1 and of world 2.
It starts every other member as a process, each in one world only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable

import multiworld
from multiworld import World, WorldBrokenError, WorldClosedError, WorldManager

WORLDS = (1, 2)
STEP_S = 0.01  # pause after each step, so that a person can follow

Step = Callable[[World, int], Awaitable[str]]


def parse(description: str | None) -> argparse.Namespace:
    """Parse the arguments that the examples have in common."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--world",
        action="append",
        default=[],
        metavar="ID:RANK",
        help="join world ID as RANK (repeatable; default: lead, and start workers)",
    )
    parser.add_argument(
        "--addr", default="", metavar="HOST:PORT", help="address of rank 0 of world 1"
    )
    parser.add_argument(
        "--store",
        default=os.environ.get("MULTIWORLD_STORE", ""),
        metavar="tcp://HOST:PORT",
        help="address of a `multiworld store` (default: MULTIWORLD_STORE, or --addr)",
    )
    parser.add_argument("--backend", default="direct", help="direct (default) or gloo")
    parser.add_argument("--size", type=int, default=2, help="members of each world")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kill", action="store_true", help="kill a worker half way")
    args = parser.parse_args()
    if args.world and not (args.addr or args.store):
        parser.error("--world needs --store, or --addr with rank 0 of world 1")
    return args


def run(description: str | None, step: Step) -> None:
    """Run ``step(world, number)`` again and again, on every member of every world."""
    args = parse(description)
    with contextlib.ExitStack() as stack:
        workers: dict[int, subprocess.Popen[bytes]] = {}
        memberships = [tuple(map(int, world.split(":"))) for world in args.world]
        if not memberships:
            if not args.store:
                args.addr = args.addr or f"127.0.0.1:{free_port()}"
            memberships = [(world, 0) for world in WORLDS]
            for world in WORLDS:
                for rank in range(1, args.size):
                    workers[world] = stack.enter_context(
                        start_worker(args, world, rank)
                    )
        good = asyncio.run(take_part(args, memberships, step, workers))
    sys.exit(0 if good else 1)


@contextlib.contextmanager
def start_worker(
    args: argparse.Namespace, world: int, rank: int
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """Start this program as one member of one world; wait for it at the end."""
    command = [sys.executable, sys.argv[0], "--world", f"{world}:{rank}"]
    command += ["--store", args.store] if args.store else ["--addr", args.addr]
    command += ["--backend", args.backend]
    command += ["--size", str(args.size), "--steps", str(args.steps)]
    process = subprocess.Popen(command)
    try:
        yield process
        process.wait(timeout=20)
    finally:
        process.kill()
        process.wait()


async def take_part(
    args: argparse.Namespace,
    memberships: list[tuple[int, int]],
    step: Step,
    workers: dict[int, subprocess.Popen[bytes]],
) -> bool:
    """Take part in every world, each in its own task; tell whether all went well."""
    async with WorldManager() as manager:
        tasks = [
            member(manager, args, world, rank, step, workers.get(world))
            for world, rank in memberships
        ]
        return all(await asyncio.gather(*tasks))


async def member(
    manager: WorldManager,
    args: argparse.Namespace,
    world_id: int,
    rank: int,
    step: Step,
    worker: subprocess.Popen[bytes] | None,
) -> bool:
    """Join one world and take its steps until they are done or the world breaks."""
    is_victim = args.kill and worker is not None and world_id == WORLDS[-1]
    world = await manager.join(
        f"world{world_id}",
        rank=rank,
        size=args.size,
        store=args.store or f"tcp://{args.addr}",
        backend=args.backend,
    )
    try:
        for number in range(args.steps):
            if is_victim and worker is not None and number == args.steps // 2:
                say(world, f"killing process {worker.pid}")
                worker.kill()
            text = await step(world, number)
            if number % max(1, args.steps // 4) == 0:
                say(world, f"step {number}: {text}")
            await asyncio.sleep(STEP_S)
    except (WorldBrokenError, WorldClosedError) as error:
        say(world, f"stopped at step {number}: {error}")
        # Expected only if this leader killed its worker.
        return is_victim and isinstance(error, multiworld.MemberLostError)
    say(world, f"all {args.steps} steps done")
    return not is_victim


def say(world: World, text: str) -> None:
    """Print a line with the world and the rank."""
    # One write for each line, because several processes share the terminal.
    sys.stdout.write(f"[{world.name} rank {world.rank}] {text}\n")
    sys.stdout.flush()


def free_port() -> int:
    """Return a TCP port of loopback that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
