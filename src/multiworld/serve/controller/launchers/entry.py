"""Entry point of every process of a service: a gateway or a replica."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from pathlib import Path

from setproctitle import setproctitle

from multiworld.log_format import configure
from multiworld.serve.replica.batches.rank_group import LEADER, fork_ranks
from multiworld.serve.replica.process import run_follower, run_worker
from multiworld.serve.wire.process_args import ProcessArgs

# Score with which the kernel's OOM killer kills replicas before gateways and the store.
OOM_SCORE = 500


def main(text: str) -> int:
    """Run the process described by ``ProcessArgs`` as JSON; return its exit code."""
    args = ProcessArgs.model_validate_json(text)
    configure(os.environ, args.name, min(logging.INFO, logging.getLogger().level))
    rank = args.rank
    setproctitle(f"multiworld {args.name}" + (f" rank {rank}" if rank else ""))
    if args.alive and Path(args.alive).exists():
        # Lock the file until this process exits. The store exits when no process holds
        # a lock.
        fcntl.flock(os.open(args.alive, os.O_RDONLY), fcntl.LOCK_SH)
    if args.role == "gateway":
        # Imported here, because replicas need no web server.
        from multiworld.serve.gateway.process import run_gateway

        return asyncio.run(run_gateway(args))
    assert args.spec is not None
    _offer_to_oom_killer()
    if rank is None:
        rank = fork_ranks(args.spec.stages[args.stage].ranks)
        if rank != LEADER:
            setproctitle(f"multiworld {args.name} rank {rank}")
    if rank != LEADER:
        return asyncio.run(run_follower(args, rank))
    return asyncio.run(run_worker(args))


def _offer_to_oom_killer() -> None:
    try:
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    except OSError:
        pass  # the machine does not allow it; the replica keeps its score
