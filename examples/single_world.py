"""Plain torch.distributed, for comparison: one failure stops every member.

All members run all_reduce in a loop. Point-to-point messages would hide the effect,
because Gloo's pairs are independent of each other. With --kill, or when you kill one
member by hand, every other member's loop ends with an error that names no rank.

    python examples/single_world.py --kill
    python examples/single_world.py --multihost --rank 0 --addr 10.0.0.1:29500
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from common import free_port


def parse_arguments() -> argparse.Namespace:
    """Parse the arguments, which have the names of pymultiworld's example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--worldsize", type=int, default=3)
    parser.add_argument("--multihost", action="store_true", help="run one rank only")
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument(
        "--addr", default="127.0.0.1", metavar="HOST:PORT", help="address of rank 0"
    )
    # pymultiworld's example of this name has the port apart.
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kill", action="store_true", help="kill a member half way")
    args = parser.parse_args()
    if args.multihost and args.rank < 0:
        parser.error("--multihost needs --rank")
    host, colon, port = args.addr.rpartition(":")
    if colon:
        args.addr, args.port = host, int(port)
    return args


def reduce_for_ever(args: argparse.Namespace) -> int:
    """Run one member; return the number of steps that it completed."""
    os.environ.update(MASTER_ADDR=args.addr, MASTER_PORT=str(args.port or 29500))
    dist.init_process_group(args.backend, rank=args.rank, world_size=args.worldsize)
    print(f"[rank {args.rank}] process {os.getpid()}", flush=True)
    done = 0
    try:
        for done in range(args.steps):
            dist.all_reduce(torch.ones(4))
            if args.kill and done == args.steps // 2 and args.rank == 1:
                os.kill(os.getpid(), 9)
            time.sleep(0.01)
    except RuntimeError as error:
        text = str(error).splitlines()[0][:150]
        print(f"[rank {args.rank}] stopped at step {done}: {text}", flush=True)
        return done
    print(f"[rank {args.rank}] all {args.steps} steps done", flush=True)
    dist.destroy_process_group()
    return args.steps


def start_all(args: argparse.Namespace) -> bool:
    """Start every member; tell whether all finished or, with --kill, none did."""
    port = str(args.port or free_port())
    command = [sys.executable, sys.argv[0], "--multihost"]
    command += ["--worldsize", str(args.worldsize), "--steps", str(args.steps)]
    command += ["--backend", args.backend, "--addr", f"{args.addr}:{port}"]
    command += ["--kill"] if args.kill else []
    members = [
        subprocess.Popen([*command, "--rank", str(rank)])
        for rank in range(args.worldsize)
    ]
    try:
        codes = [process.wait(timeout=60) for process in members]
    finally:
        for process in members:
            process.kill()
            process.wait()
    finished = sum(code == 0 for code in codes)
    print(f"{finished} of {args.worldsize} members took all steps")
    return finished == (0 if args.kill else args.worldsize)


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.multihost:
        sys.exit(0 if reduce_for_ever(arguments) == arguments.steps else 1)
    sys.exit(0 if start_all(arguments) else 1)
