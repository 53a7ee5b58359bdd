"""One stream of generated text, as its gateway has it."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from multiworld.errors import ServeError
from multiworld.serve.core.losses import Losses
from multiworld.serve.generation.prefixes import Digest
from multiworld.serve.tenants.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.transport.generation_messages import Sampling, TokenItem


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits of a stream, besides its deadline.

    Attributes:
        first_token_s: Most seconds until its first token; None: no limit.
        between_tokens_s: Most seconds between two tokens; None: no limit.
    """

    first_token_s: float | None = None
    between_tokens_s: float | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """Replicas that compute a stream.

    Attributes:
        version: Their version of the model.
        replicas: Their names, by stage.
    """

    version: str
    replicas: tuple[str, ...]


NO_LIMITS = TimeLimits()
"""Only the deadline counts."""


@dataclass(slots=True, eq=False)
class Move:
    """A stream's move to other replicas, which are prepared while it goes on.

    Attributes:
        chain: The chain from then on.
        attempt: Number of the attempt that they are prepared for; -1 before.
        tokens: Number of the stream's tokens when the replicas were last told of it.
        told_at: Monotonic time of that.
        waits_for: Replicas that are still to tell that they are prepared.
    """

    chain: Chain
    attempt: int = -1
    tokens: int = 0
    told_at: float = 0.0
    waits_for: int = 0


@dataclass(slots=True, eq=False)
class Stream:
    """A stream whose client waits for tokens.

    Attributes:
        number: Its number at this gateway.
        model: Name of the model.
        version: Version that it began with.
        tokens: The prompt, and the tokens that were delivered.
        prompt: Number of tokens of the prompt.
        sampling: How its tokens are chosen.
        deadline_at: Monotonic time at which it is given up.
        via: For a probe: replicas by stage that it must go through.
        attempt: Number of the current attempt.
        spent: Highest number of an attempt so far.
        chain: Replicas by stage; empty while it waits for a chain.
        kept: Replicas by stage that have an earlier attempt; empty if it begins anew.
        kept_attempt: Number of that attempt.
        move: Its move to other replicas, while they are prepared.
        stays_until: Monotonic time before which it is not moved.
        given_up: Moves that were given up.
        share: Its tenant.
        prefixes: Names of the prefixes of its prompt, the shortest first.
        session: Name of its session; empty: none.
        request: Id of its request; empty: none.
        fingerprints: Kinds of machines that it was computed on, by stage.
        losses: Replicas that were lost with it since its last token.
        returns: Attempts that came back since its last token.
        is_alone: Whether it is computed now and nothing else is, as a suspect.
        left: Replicas by stage of the attempt before, if one of them gave it back.
        was_alone: Whether it was computed alone there.
        not_before: Monotonic time of the next attempt.
        limits: Its time limits besides the deadline.
        began_at: Monotonic time at which it was accepted.
        first_at: Monotonic time of its first token; None before.
        last_at: Monotonic time of its last token so far.
        arrived: Tokens that the client has not taken yet; the last one stays.
        has_arrived: Set when there are any.
    """

    number: int
    model: str
    version: str
    tokens: list[int]
    prompt: int
    sampling: Sampling
    deadline_at: float
    via: dict[int, str]
    limits: TimeLimits
    attempt: int = 0
    spent: int = 0
    chain: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    kept_attempt: int = -1
    move: Move | None = None
    stays_until: float = 0.0
    given_up: int = 0
    share: Share = DEFAULT_SHARE
    prefixes: tuple[Digest, ...] = ()
    session: str = ""
    request: str = ""
    fingerprints: dict[int, str] = field(default_factory=dict)
    losses: Losses = field(default_factory=Losses)
    returns: int = 0
    is_alone: bool = False
    left: tuple[str, ...] = ()
    was_alone: bool = False
    not_before: float = 0.0
    began_at: float = 0.0
    first_at: float | None = None
    last_at: float = 0.0
    arrived: deque[TokenItem | ServeError] = field(default_factory=deque)
    has_arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def late(self, now: float, resumed_at: float = -math.inf) -> str:
        """Return which time limit has passed; empty if none has.

        Args:
            now: Monotonic time in seconds.
            resumed_at: End of the gateway's last pause: no wait for a token began
                before it.
        """
        made = len(self.tokens) - self.prompt
        if now > self.deadline_at:
            most = self.sampling.max_tokens
            return f"deadline passed after {made} of at most {most} tokens"
        since = self.began_at if self.first_at is None else self.last_at
        since = max(since, resumed_at)
        first_s, between_s = self.limits.first_token_s, self.limits.between_tokens_s
        limit_s = first_s if self.first_at is None else between_s
        if limit_s is None or now - since <= limit_s:
            return ""
        what = "first token" if self.first_at is None else f"token after {made}"
        return f"no {what} within {limit_s:g} s"

    @property
    def name(self) -> str:
        """Its name in logs."""
        request = self.request or "without a request"
        return f"request {request}, stream {self.number}"

    def next_attempt(self) -> int:
        """Return the number of a new attempt."""
        self.spent += 1
        return self.spent

    @property
    def has_ended(self) -> bool:
        """True if its last token, or its error, has arrived."""
        return bool(self.arrived) and _is_last(self.arrived[-1])

    async def items(self) -> AsyncGenerator[TokenItem]:
        """Yield its tokens as they arrive.

        Raises:
            ServeError: It has failed.

        Cancellation: Safe.
        """
        while True:
            while not self.arrived:
                self.has_arrived.clear()
                await self.has_arrived.wait()
            item = self.arrived[0]
            if isinstance(item, ServeError):
                raise item
            if not item.finish:
                self.arrived.popleft()
                yield item
                continue
            yield item
            return

    def put(self, item: TokenItem | ServeError) -> None:
        """Give the client a token, or the error that ends the stream."""
        self.arrived.append(item)
        self.has_arrived.set()


def _is_last(item: TokenItem | ServeError) -> bool:
    return isinstance(item, ServeError) or bool(item.finish)
