"""Engine around a server that samples itself: llama.cpp, or one with OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from multiworld.errors import ServeError
from multiworld.serve.engine.external.engine_args import check_adapter
from multiworld.serve.engine.external.engine_server import EngineServer
from multiworld.serve.engine.external.pieces import Piece, next_piece
from multiworld.serve.engine.external.token_servers import Dialect
from multiworld.serve.engine.external.whole_engine import (
    WARM_UP,
    EngineLostError,
    EngineSettings,
    EngineToken,
    Run,
    RunFailedError,
)
from multiworld.serve.wire.generation_messages import Sampling

logger = logging.getLogger("multiworld.serve")

Owner = tuple[str, str]  # tenant and adapter of a sequence


class Slots:
    """Slots of a server for sequences; each keeps the KV of the last sequence in it."""

    def __init__(self, count: int) -> None:
        self._kept: dict[int, tuple[Owner | None, tuple[int, ...]]]
        self._kept = dict.fromkeys(range(count), (None, ()))
        self._places = asyncio.Semaphore(count)

    async def take(self, run: Run) -> tuple[int, bool]:
        """Wait for a free slot; return the free one with the longest common prefix.

        Also return whether the slot's keys and values may be used: they must be of the
        same tenant and adapter.
        """
        await self._places.acquire()
        wanted, given = (run.tenant, run.adapter), tuple(run.tokens)

        def common(slot: int) -> int:
            owner, tokens = self._kept[slot]
            return common_prefix(tokens, given) if owner == wanted else -1

        slot = max(self._kept, key=common)
        owner, _ = self._kept.pop(slot)
        return slot, owner == wanted

    def free(self, slot: int, owner: Owner | None, tokens: Sequence[int]) -> None:
        """Free a slot that has these tokens; ``owner`` None: its content is unknown."""
        self._kept[slot] = owner, tuple(tokens)
        self._places.release()


def common_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of the common prefix, in tokens."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:  # comparing slices runs in C
            low = middle
        else:
            high = middle - 1
    return low


END_S = 0.25  # seconds to wait for the end of an answer after its last token


async def _wait_end(answers: AsyncGenerator[list[EngineToken]]) -> None:
    """Wait briefly for the end of an answer, so that its connection is reused."""
    # It is no error if the server never ends the answer, because all tokens have
    # arrived.
    with contextlib.suppress(TimeoutError, RunFailedError):
        async with asyncio.timeout(END_S):
            async for _ in answers:
                pass


class TokenServerEngine:
    """One server that continues sequences of tokens.

    Subclasses start or find the server, and set ``_server`` and ``_dialect``.
    """

    has_adapters = True

    def __init__(self, settings: EngineSettings, capacity: int = 0) -> None:
        self._settings = settings
        self.phase = "waiting"
        self._server: EngineServer | None = None
        self._dialect: Dialect | None = None
        # ``_capacity``: the server's KV memory in tokens; 0: unknown.
        self._capacity, self._tokens = capacity, 0
        # One slot more, for a probe or a prepared sequence, which do not count towards
        # ``max_num_seqs``.
        self._slots = Slots(settings.max_num_seqs + 1)

    @property
    def usage(self) -> float:
        """Used fraction of the server's capacity; 0.0 if that is not known."""
        return min(1.0, self._tokens / self._capacity) if self._capacity else 0.0

    async def warm_up(self) -> None:
        self.phase = "warming up"
        try:
            async with (
                asyncio.timeout(2 * self._settings.hung_s),
                aclosing(self.generate(Run((0,), 1, WARM_UP))) as found,
            ):
                async for _ in found:
                    pass
        except (ServeError, TimeoutError) as error:
            await self.close()
            why = str(error) or "no token came in time"
            raise EngineLostError(f"{self.title} cannot generate: {why}") from error
        self.phase = ""

    @property
    def title(self) -> str:
        return self._dialect.title if self._dialect else "the server"

    async def wait_lost(self) -> str:
        assert self._server is not None
        return await self._server.wait_lost()

    def stopped_s(self) -> float:
        return 0.0 if self._server is None else self._server.stopped_s()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()

    # Sequences.

    def check(self, sampling: Sampling) -> None:
        assert self._dialect is not None
        self._dialect.check(sampling)

    async def generate(self, run: Run) -> AsyncGenerator[Sequence[EngineToken]]:
        if run.adapter:
            check_adapter(run, self._settings)
        slot, keep = await self._slots.take(run)
        tokens, anew, has_answered = list(run.tokens), False, False
        self._tokens += len(tokens)
        try:
            while (left := run.sampling.max_tokens - (len(tokens) - run.prompt)) > 0:
                assert self._dialect is not None
                piece = next_piece(
                    tokens, run.prompt, run.sampling, self._dialect.piece, anew=anew
                )
                before = len(tokens)
                async with aclosing(self._new(run, piece, slot, keep)) as found:
                    async for some in found:
                        has_answered, some = True, some[:left]
                        tokens += (each.token for each in some)
                        self._tokens += len(some)
                        left -= len(some)
                        yield some
                        if any(each.token in run.ends for each in some) or not left:
                            return
                if len(tokens) == before and anew:
                    raise RunFailedError(f"{self.title} ended a sequence early")
                # If this request returned no new token, start a new piece here: the
                # server did not repeat the known tokens.
                anew, keep = len(tokens) == before, True
        finally:
            self._tokens -= len(tokens)
            # If the server has not answered, the slot may still have another tenant's
            # tokens.
            owner = (run.tenant, run.adapter) if has_answered else None
            self._slots.free(slot, owner, tokens)

    async def _new(
        self, run: Run, piece: Piece, slot: int, keep: bool
    ) -> AsyncGenerator[list[EngineToken]]:
        """Yield a piece's new tokens; stop if the server does not repeat known ones."""
        assert self._server is not None
        assert self._dialect is not None
        known, body = 0, self._dialect.body(run, piece, slot, keep)
        answers = self._dialect.answers(self._server, body, run)
        async with aclosing(answers) as found:
            async for some in found:
                expected = piece.known[known : known + len(some)]
                if [each.token for each in some[: len(expected)]] != [*expected]:
                    logger.warning(
                        "%s did not repeat the known tokens; a sequence continues "
                        "with newly drawn tokens",
                        self.title,
                    )
                    return
                known += len(some)
                if some := some[len(expected) :]:
                    yield some
                if known >= piece.count:
                    await _wait_end(found)
                    return
