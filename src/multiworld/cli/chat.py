"""``multiworld chat``: a chat with a served model, in the terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import click
import orjson

from multiworld.errors import MultiWorldError
from multiworld.net.threads import in_thread
from multiworld.serve.controller.answers import StatusAnswer
from multiworld.serve.controller.client import Service

USUAL = "http://127.0.0.1:8000"
PAUSE_S = 1.0  # seconds; longer pauses between tokens are shown
DATA = b"data: "


async def model_of(
    session: aiohttp.ClientSession, url: str, wanted: str | None = None
) -> str:
    """Return ``wanted``, by default the first model that generates text."""
    async with session.get(f"{url}/v1/models") as answer:
        listed = await _json_of(answer)
    known = [str(one["id"]) for one in listed["data"]]
    if wanted is not None:
        if wanted not in known:
            there = ", ".join(known) or "none"
            raise click.ClickException(f"no model {wanted!r} at {url}; there: {there}")
        return wanted
    # Only models that generate text have a maximum length.
    names = [one["id"] for one in listed["data"] if "max_model_len" in one]
    if not names:
        raise click.ClickException(f"no model at {url} generates text")
    return str(names[0])


async def pieces(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> AsyncIterator[str]:
    """Yield an answer piece by piece; raise ClickException if it is an error."""
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise _refusal(answer.status, await answer.read())
        async for line in answer.content:
            text = line.strip()
            if not text.startswith(DATA) or text == b"data: [DONE]":
                continue
            event = orjson.loads(text[len(DATA) :])
            if "error" in event:
                raise click.ClickException(str(event["error"]["message"]))
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


async def _json_of(answer: aiohttp.ClientResponse) -> Any:
    content = await answer.read()
    if answer.status != 200:
        raise _refusal(answer.status, content)
    return orjson.loads(content)


def _refusal(status: int, content: bytes) -> click.ClickException:
    hint = "; give it with --key" if status == 401 else ""
    return click.ClickException(_error_in(content) + hint)


def _error_in(content: bytes) -> str:
    try:
        return str(orjson.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace")[:200] or "the answer is empty"


async def _answer(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> str:
    """Print an answer as it arrives, and return it."""
    said, at = "", time.monotonic()
    async for piece in pieces(session, url, body):
        now = time.monotonic()
        if said and now - at > PAUSE_S:
            click.echo(f"\n[no token for {now - at:.1f} s]", err=True)
        at = now
        said += piece
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()
    return said


async def _chat(url: str, model: str | None, key: str, limit: int | None) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        try:
            model = await model_of(session, url, model)
            click.echo(f"{model} at {url}; Ctrl-D ends the chat", err=True)
            messages: list[dict[str, str]] = []
            while (line := await in_thread(_read)) is not None:
                messages.append({"role": "user", "content": line})
                body = {"model": model, "messages": messages, "stream": True}
                if limit is not None:
                    body["max_tokens"] = limit
                said = await _answer(session, url, body)
                messages.append({"role": "assistant", "content": said})
        except aiohttp.ClientConnectorError as error:
            raise click.ClickException(
                f"no service answers at {url} ({error.os_error.strerror}); start one "
                "with `multiworld serve`, or name its address with --url"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise click.ClickException(f"{url}: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise click.ClickException(
                f"{url} does not answer as OpenAI's API does ({type(error).__name__}: "
                f"{error})"
            ) from error


def _read() -> str | None:
    """Return the next line that is not empty; None at the end of the input."""
    while True:
        if sys.stdin.isatty():
            click.echo("> ", nl=False, err=True)
        # Not ``sys.stdin`` itself: a thread that waits for a line holds its lock, which
        # would stop the interpreter's exit.
        stdin = sys.stdin.buffer
        line: bytes = getattr(stdin, "raw", stdin).readline()
        if not line:
            return None
        if text := line.decode(errors="replace").strip():
            return text


@click.command()
@click.argument("model", required=False)
@click.option(
    "--url",
    help=f"Address of the service; by default that of this user's only service, or "
    f"{USUAL}.",
)
@click.option(
    "--key",
    envvar=["MULTIWORLD_KEY", "MULTIWORLD_API_KEY"],
    default="",
    help="Key of a tenant; safer in MULTIWORLD_KEY or MULTIWORLD_API_KEY.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    help="Maximum number of tokens of an answer.",
)
def chat(model: str | None, url: str | None, key: str, max_tokens: int | None) -> None:
    """Chat with a served MODEL, by default the first that generates text.

    Each line of the input is a message. Pauses of more than a second, such as after the
    loss of a worker, are shown.
    """
    found = (url or _url_here()).rstrip("/").removesuffix("/v1")
    asyncio.run(_chat(found, model, key, max_tokens))


def _url_here() -> str:
    """Return the address of this user's only service, or the usual one."""
    try:
        return Service(None, None).ask("GET", "/status", StatusAnswer).url
    except MultiWorldError:
        return USUAL
