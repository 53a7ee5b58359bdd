"""Faults of Failover Bench at one of two servers with OpenAI's API.

Failover Bench (github.com/failoverbench/failoverbench, methodology 0.1) has the
scenarios S01 to S16. The system under test is a service with ``engine: openai``; the
healthy server plays the fallback.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from tests.fault_server import (
    CUT_AT,
    FILTER_AT,
    RETRY_AFTER_S,
    Entry,
    Fault,
    FaultServer,
)
from tests.serve.harness import WAIT_S, Served, served
from tests.serve.texts import PROMPT, client
from tests.tiny_decoder import save_decoder

pytestmark = pytest.mark.timeout(240)

COUNT = 60
SILENCE_S = 5.0
"""``compute_s`` of the models: a server without a token for this long is hung."""
PROMPT_S = 8.0
"""Seconds for an answer that does not have to wait."""
SLACK_S = 0.25
"""Seconds by which a wait may seem shorter than it was."""
SESSIONS = 16
"""Number of sessions that are tried; each prefers one of the servers."""
OUTAGE_S, REQUESTS, INTERVAL_S, RECOVERED_S = 60.0, 20, 4.0, 30.0
"""Numbers of scenario S15."""

HAMMER, HAMMER_S = 4, 3.0
"""Scenario S02: maximum number of requests to a server within ``HAMMER_S`` seconds."""

TEXT = "Once upon a time"
CHAT = f"user: {TEXT}\nassistant: "


@dataclass
class Fleet:
    service: Served
    faulty: FaultServer
    healthy: FaultServer

    def play(self, fault: Fault, times: int | None = None, prompt: int = 0) -> None:
        """Play a fault on the faulty server, and empty the logs of both."""
        self.healthy.play(Fault.NONE, None, prompt)
        self.faulty.play(fault, times, prompt)

    def last(self) -> FaultServer | None:
        servers = self.faulty, self.healthy
        pairs = [(entry.at, server) for server in servers for entry in server.log()]
        return max(pairs, key=lambda pair: pair[0])[1] if pairs else None


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Return a service with an exact and an inexact model at the same two servers."""
    folder = save_decoder(tmp_path_factory.mktemp("decoder"))
    servers: list[FaultServer] = []
    try:
        servers += (FaultServer(folder / "tokenizer.json") for _ in range(2))
        models = {
            name: {
                "path": str(folder),
                "engine": "openai",
                "exact": name == "ids",
                "engine_args": {"urls": [f"{each.url}/{name}" for each in servers]},
                "generation": {"max_num_seqs": 8},
                "compute_s": SILENCE_S,
                "deadline_s": 60.0,
            }
            for name in ("ids", "text")
        }
        spec = {
            "app": "failover",
            "models": models,
            "gateway": {"port": 0},
            "orphan_s": 2.0,
        }
        with served(tmp_path_factory.mktemp("failover"), spec) as made:
            yield Fleet(made, *servers)
    finally:
        for server in servers:
            server.end()


@dataclass
class Answer:
    """An answer as the client sees it."""

    text: str = ""
    finish: str | None = None
    model: str = ""
    usage: tuple[int, int] = (0, 0)  # tokens of the prompt, and generated ones
    error: openai.APIError | None = None
    took_s: float = 0.0


async def ask(
    api: openai.AsyncOpenAI, model: str, session: str, *, is_chat: bool = False
) -> Answer:
    """Send a request, sampled if the model is exact; return its answer, or its error.

    Without token ids, only greedy streams continue with the same text.
    """
    answer, began = Answer(), time.monotonic()
    wanted: dict[str, Any] = {
        "model": model,
        "max_tokens": COUNT,
        "temperature": 1.0 if model == "ids" else 0.0,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"prompt_cache_key": session},
    }
    stream: Any
    try:
        if is_chat:
            messages: Any = [{"role": "user", "content": TEXT}]
            stream = await api.chat.completions.create(messages=messages, **wanted)
        else:
            stream = await api.completions.create(prompt=PROMPT, **wanted)
        async for chunk in stream:
            answer.model = chunk.model
            for choice in chunk.choices:
                answer.text += (choice.delta.content if is_chat else choice.text) or ""
                answer.finish = choice.finish_reason or answer.finish
            if chunk.usage is not None:
                usage = chunk.usage
                answer.usage = usage.prompt_tokens, usage.completion_tokens
    except openai.APIError as error:
        answer.error = error
    answer.took_s = time.monotonic() - began
    return answer


async def aimed(
    fleet: Fleet, api: openai.AsyncOpenAI, model: str, *, is_chat: bool = False
) -> tuple[str, Answer]:
    """Return a session that prefers the faulty server, and its undisturbed answer.

    This also waits until that server is used again.
    """
    async with asyncio.timeout(WAIT_S):
        for number in itertools.count():
            session = f"session {number % SESSIONS}"
            fleet.play(Fault.NONE)
            answer = await ask(api, model, session, is_chat=is_chat)
            assert answer.error is None
            if fleet.faulty.log() and not fleet.healthy.log():
                return session, answer
    raise AssertionError("no end of sessions")


def gaps(entries: list[Entry]) -> list[float]:
    """Return the seconds between consecutive requests."""
    return [after.at - before.at for before, after in itertools.pairwise(entries)]


@dataclass(frozen=True)
class Case:
    """A fault, and what a correct system does.

    Attributes:
        times: Requests with the fault; None: all.
        faulty: Numbers of requests to the faulty server: of the exact model, and of the
            other. The exact one requests 60 tokens as 32 and 28.
        healthy: The same to the healthy server.
        code: The server's error that the client gets; empty: it gets a whole answer.
        limit_s: Seconds until the answer, at most.
        is_default: Runs in ``make test``, for the exact model.
    """

    id: str
    fault: Fault
    times: int | None
    faulty: tuple[int, int]
    healthy: tuple[int, int]
    code: str = ""
    limit_s: float = PROMPT_S
    is_default: bool = False
    is_chat: bool = False


ONCE, ALL = 1, None
HUNG_S = 3 * SILENCE_S

CASES = [
    Case("S01", Fault.RATE_LIMIT_AFTER, ONCE, (1, 1), (2, 1), is_default=True),
    Case("S02", Fault.RATE_LIMIT, ALL, (1, 1), (2, 1)),
    Case("S03", Fault.BROKEN, ONCE, (1, 1), (2, 1)),
    Case("S04", Fault.OVERLOADED, ALL, (1, 1), (2, 1)),
    Case("S05", Fault.RESET, ONCE, (1, 1), (2, 1)),
    Case("S06", Fault.SILENT, ALL, (1, 1), (2, 1), limit_s=HUNG_S),
    Case("S07", Fault.SLOW, ALL, (1, 1), (2, 1), limit_s=HUNG_S),
    Case("S08", Fault.CUT, ALL, (2, 1), (1, 1), is_default=True),
    Case("S09", Fault.STALL, ALL, (1, 1), (2, 1), limit_s=HUNG_S),
    Case("S10", Fault.MALFORMED, ALL, (1, 1), (2, 1)),
    Case("S11", Fault.NO_DONE, ALL, (2, 1), (0, 0)),
    Case("S11-open", Fault.OPEN, ALL, (2, 1), (0, 0)),  # not in the benchmark
    Case(
        "S12",
        Fault.CONTEXT,
        ALL,
        (1, 1),
        (0, 0),
        code="context_length_exceeded",
        is_default=True,
    ),
    Case("S13", Fault.FILTER, ALL, (1, 1), (0, 0), code="content_policy_violation"),
    Case("S14", Fault.CUT, ALL, (2, 1), (1, 1), is_chat=True),
    Case("S16", Fault.OVERLOADED, ALL, (1, 1), (2, 1), is_chat=True),
]


def parameter(model: str, case: Case) -> Any:
    is_heavy = not case.is_default or model == "text"
    marks = [pytest.mark.heavy] if is_heavy else []
    return pytest.param(model, case, marks=marks, id=f"{case.id}-{model}")


@pytest.mark.parametrize(
    ("model", "case"),
    [parameter(model, case) for model in ("ids", "text") for case in CASES],
)
async def test_fault_ends_as_the_benchmark_says(
    model: str, case: Case, fleet: Fleet
) -> None:
    prompt = len(CHAT) if case.is_chat else len(PROMPT)
    async with client(fleet.service) as api:
        session, undisturbed = await aimed(fleet, api, model, is_chat=case.is_chat)
        assert undisturbed.usage == (prompt, COUNT)
        fleet.play(case.fault, case.times, prompt)
        answer = await ask(api, model, session, is_chat=case.is_chat)
        counts = len(fleet.faulty.log()), len(fleet.healthy.log())
        place = int(model == "text")
        assert counts == (case.faulty[place], case.healthy[place])
        paths = {e.path for e in (*fleet.faulty.log(), *fleet.healthy.log())}
        assert paths == {f"/{model}/v1/completions"}
        assert answer.took_s < case.limit_s
        if case.code:
            assert answer.error is not None
            assert case.code in str(answer.error)
            assert not answer.text
            with pytest.raises(openai.BadRequestError, match=case.code):
                await api.completions.create(
                    model=model,
                    prompt=PROMPT,
                    max_tokens=COUNT,
                    extra_body={"prompt_cache_key": session},
                )
            assert len(fleet.faulty.log()) == counts[0] + 1
            assert not fleet.healthy.log()
        else:
            assert answer.error is None
            assert (answer.text, answer.finish) == (undisturbed.text, "length")
            assert (answer.usage, answer.model) == (undisturbed.usage, model)
            answering = fleet.healthy if counts[1] else fleet.faulty
            assert fleet.last() is answering
        _, again = await aimed(fleet, api, model, is_chat=case.is_chat)
        assert again.text == undisturbed.text


@pytest.mark.heavy
@pytest.mark.parametrize("fault", [Fault.OVERLOADED, Fault.DOWN])
async def test_server_that_flaps_is_used_again(fault: Fault, fleet: Fleet) -> None:
    """S15: requests are answered meanwhile, and the server is soon used again."""
    async with client(fleet.service) as api:
        session, undisturbed = await aimed(fleet, api, "ids")
        fleet.play(fault)
        began = time.monotonic()
        for number in range(REQUESTS):
            # The intervals are the scenario's.
            await asyncio.sleep(began + number * INTERVAL_S - time.monotonic())
            if time.monotonic() - began > OUTAGE_S and fault is not Fault.NONE:
                # At most one request of each client's, while it was down.
                assert len(fleet.faulty.log()) <= number
                fault = Fault.NONE
                fleet.play(fault)
            answer = await ask(api, "ids", session)
            assert answer.error is None
            assert answer.text == undisturbed.text
            assert answer.took_s < 2 * PROMPT_S
        assert fault is Fault.NONE
        async with asyncio.timeout(began + OUTAGE_S + RECOVERED_S - time.monotonic()):
            await aimed(fleet, api, "ids")


# What the benchmark's table demands beyond one request.


@pytest.mark.heavy
async def test_server_is_left_alone_until_its_retry_after(fleet: Fleet) -> None:
    async with client(fleet.service) as api:
        session, undisturbed = await aimed(fleet, api, "ids")
        fleet.play(Fault.RATE_LIMIT_AFTER)
        limit = time.monotonic() + RETRY_AFTER_S
        while time.monotonic() < limit:
            answer = await ask(api, "ids", session)
            assert answer.text == undisturbed.text
        found = gaps(fleet.faulty.log())
        assert all(gap > RETRY_AFTER_S - SLACK_S for gap in found), found


@pytest.mark.heavy
async def test_busy_servers_are_not_hammered(fleet: Fleet) -> None:
    """S02 at both servers: a request backs off, and is then answered."""
    async with client(fleet.service) as api:
        session, undisturbed = await aimed(fleet, api, "ids")
        for server in (fleet.faulty, fleet.healthy):
            server.play(Fault.RATE_LIMIT)
        asking = asyncio.ensure_future(ask(api, "ids", session))
        await asyncio.sleep(HAMMER_S)  # the benchmark's window
        counts = len(fleet.faulty.log()), len(fleet.healthy.log())
        fleet.play(Fault.NONE)
        answer = await asking
        assert answer.error is None
        assert answer.text == undisturbed.text
        assert all(1 <= count <= HAMMER for count in counts), counts


@pytest.mark.heavy
async def test_request_waits_for_the_retry_after_of_both_servers(fleet: Fleet) -> None:
    """S01 at both servers."""
    async with client(fleet.service) as api:
        session, undisturbed = await aimed(fleet, api, "ids")
        for server in (fleet.faulty, fleet.healthy):
            server.play(Fault.RATE_LIMIT_AFTER, ONCE)
        answer = await ask(api, "ids", session)
        assert answer.error is None
        assert answer.text == undisturbed.text
        logs = fleet.faulty.log(), fleet.healthy.log()
        first = [gaps(entries)[0] for entries in logs if len(entries) > 1]
        assert all(gap > RETRY_AFTER_S - SLACK_S for gap in first), first


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["ids", "text"])
async def test_refused_continuation_is_not_the_clients_error(
    model: str, fleet: Fleet
) -> None:
    """S14, if the other server refuses the prompt with the delivered tokens."""
    async with client(fleet.service) as api:
        session, undisturbed = await aimed(fleet, api, model)
        # The first piece of the exact model is whole.
        fleet.faulty.play(Fault.CUT, 2 if model == "ids" else ONCE, len(PROMPT))
        fleet.healthy.play(Fault.NO_CONTINUATION, None, len(PROMPT))
        answer = await ask(api, model, session)
        assert len(answer.text) >= CUT_AT
        assert answer.error is None
        assert answer.text == undisturbed.text
        assert fleet.last() is fleet.faulty


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["ids", "text"])
async def test_answer_that_a_server_filters_ends(model: str, fleet: Fleet) -> None:
    """S13 in mid-stream."""
    async with client(fleet.service) as api:
        session, undisturbed = await aimed(fleet, api, model)
        fleet.play(Fault.FILTERED, None, len(PROMPT))
        answer = await ask(api, model, session)
        assert answer.text == undisturbed.text[:FILTER_AT]
        assert answer.finish == "content_filter" or answer.error is not None
        assert len(fleet.faulty.log()) == 1
        assert not fleet.healthy.log()
