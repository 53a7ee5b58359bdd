"""Writer of a service's record, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from multiworld.net.rare_log import RareLog
from multiworld.serve.fleet.record import Record


class RecordKeeper:
    """Writes records, skipping outdated ones; a slow disk blocks nothing else."""

    def __init__(self, save: Callable[[Record], None], log: RareLog) -> None:
        self._save, self._log = save, log
        self._newest: Record | None = None
        self._saved: Record | None = None
        self._writing: asyncio.Task[None] | None = None

    def keep(self, record: Record) -> None:
        """Write a record soon, unless it equals the last one written."""
        self._newest = record
        if record != self._saved and (self._writing is None or self._writing.done()):
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def settled(self, limit_s: float) -> None:
        """Wait at most `limit_s` until the newest record is written or has failed."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=limit_s)

    async def _write(self) -> None:
        while self._newest is not None and self._newest != self._saved:
            record = self._newest
            try:
                await asyncio.to_thread(self._save, record)
            except OSError as error:  # the next record tries again
                self._log.error("cannot write the record of the service", error)
                return
            self._saved = record
