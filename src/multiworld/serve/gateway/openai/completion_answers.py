"""Answers to completion requests in OpenAI's format, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from starlette.responses import Response

from multiworld.errors import wrong_field
from multiworld.serve.gateway.http.http_responses import event_of, json_response
from multiworld.serve.gateway.openai.choices import (
    KEEP_ALIVE_S,
    Choice,
    Piece,
    Pieces,
    chat_logprobs,
    text_logprobs,
)
from multiworld.serve.gateway.openai.preparation import Ready
from multiworld.serve.gateway.openai.reasoning import NO_TOKEN, AnswerParser, Thought
from multiworld.serve.gateway.openai.request_lifecycle import Form
from multiworld.serve.gateway.openai.tool_calls import Call
from multiworld.serve.wire.generation_messages import TokenItem

MAX_HELD = 64  # maximum tokens without visible output that wait for one event
MAX_LOGPROBS = 500_000  # maximum logprobs of the output in one whole answer


async def whole(ready: Ready, pieces: Pieces) -> Response:
    """Return the whole answer, once all choices have ended."""
    outputs = [ChoiceOutput([echo]) for echo in ready.echoes]
    per_token, scored = ready.wanted.sampling.logprobs, 0
    async for piece in pieces:
        if piece is None:
            continue
        scored += 0 if per_token is None else 1 + per_token
        if scored > MAX_LOGPROBS:
            rule = (
                f"would give the answer more than {MAX_LOGPROBS} log-probabilities; "
                "set max_tokens, lower logprobs, or stream the answer"
            )
            raise wrong_field("logprobs", rule)
        index = piece.choice.index
        outputs[index].add(piece, ready.parsers[index])
    if ready.wanted.sampling.logprobs is not None:  # logprobs take long to render
        return await asyncio.to_thread(_rendered, ready, outputs)
    return _rendered(ready, outputs)


@dataclass(slots=True)
class ChoiceOutput:
    """The output of one choice so far."""

    text: list[str]
    thoughts: list[str] = field(default_factory=list)
    # Name and parts of the arguments of each tool call, by number of the call.
    calls: dict[int, tuple[str, list[str]]] = field(default_factory=dict)

    def add(self, piece: Piece, parser: AnswerParser | None) -> None:
        for part in [piece.text] if parser is None else _parts(parser, piece):
            if isinstance(part, str):
                self.text.append(part)
            elif isinstance(part, Thought):
                self.thoughts.append(part.text)
            else:
                _, arguments = self.calls.setdefault(part.number, (part.name, []))
                arguments.append(part.arguments)


def _parts(parser: AnswerParser, piece: Piece) -> Iterator[str | Call | Thought]:
    if piece.item is not None:
        yield from parser.feed(piece.text, piece.item.token)
    elif piece.text:  # held back until the deadline cut the choice
        yield from parser.feed(piece.text, NO_TOKEN)
    if piece.finish:
        yield from parser.end()


def _rendered(ready: Ready, outputs: Sequence[ChoiceOutput]) -> Response:
    found = [
        _choice(ready, choice, each, _shown_items(ready, choice), choice.finish)
        for choice, each in zip(ready.choices, outputs, strict=True)
    ]
    answer = {**ready.head(), "choices": found, "usage": _usage(ready)}
    if ready.is_chat and ready.wanted.has_ids:  # at the top level, as in vLLM
        answer["prompt_token_ids"] = list(ready.choices[0].prompt)
    return json_response(answer)


def _shown_items(ready: Ready, choice: Choice) -> Sequence[TokenItem]:
    parser = ready.parsers[choice.index]
    if parser is None or ready.wanted.has_reasoning:
        return choice.items
    return choice.items[parser.thought_tokens :]


def _usage(ready: Ready) -> dict[str, Any]:
    prompts = {id(choice.prompt): len(choice.prompt) for choice in ready.choices}
    made = sum(choice.made for choice in ready.choices)
    asked = sum(prompts.values())
    found: dict[str, Any] = {
        "prompt_tokens": asked,
        "completion_tokens": made,
        "total_tokens": asked + made,
    }
    if ready.reasoning is not None:
        thought = sum(p.thought_tokens for p in ready.parsers if p is not None)
        found["completion_tokens_details"] = {"reasoning_tokens": thought}
    return found


def _choice(
    ready: Ready,
    choice: Choice,
    output: ChoiceOutput,
    items: Sequence[TokenItem],
    finish: str,
) -> dict[str, Any]:
    found: dict[str, Any] = {"index": choice.index, "finish_reason": finish or None}
    if ready.wanted.has_ids:
        found["token_ids"] = [item.token for item in items]
        found["prompt_token_ids"] = list(choice.prompt)
    has_logprobs = ready.wanted.sampling.logprobs is not None
    if ready.is_chat:
        found["message"] = _message(ready, choice, output)
        if "tool_calls" in found["message"] and not _is_cut(ready, choice):
            found["finish_reason"] = "tool_calls"
        found["logprobs"] = (
            chat_logprobs(ready.served.tokenizer, items) if has_logprobs else None
        )
    else:
        found["text"] = "".join(output.text)
        found["logprobs"] = _text_logprobs(ready, choice) if has_logprobs else None
    return found


def _is_cut(ready: Ready, choice: Choice) -> bool:
    """Return whether the last tool call of a choice may be incomplete."""
    calling = ready.wanted.calling
    is_forced = calling is not None and not calling.is_free
    return choice.finish == "length" or (is_forced and choice.text.is_stopped)


def _text_logprobs(ready: Ready, choice: Choice) -> dict[str, Any]:
    tokenizer, echo = ready.served.tokenizer, ready.echoes[choice.index]
    offsets = [len(echo) + at for at in choice.offsets]
    if not ready.wanted.echo:
        return text_logprobs(tokenizer, choice.items, offsets)
    before = tokenizer.offsets(choice.prompt, echo, skips_special=False)
    offsets = [*before, *offsets]
    return text_logprobs(tokenizer, choice.items, offsets, choice.prompt, choice.scores)


def _message(ready: Ready, choice: Choice, output: ChoiceOutput) -> dict[str, Any]:
    content = "".join(output.text)
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if ready.reasoning is not None and ready.wanted.has_reasoning:
        found["reasoning"] = "".join(output.thoughts) or None
    if output.calls:
        found["content"] = content if content.strip() else None
        found["tool_calls"] = [
            {
                "id": ready.call_id(choice.index, number),
                "type": "function",
                "function": {"name": name, "arguments": "".join(arguments)},
            }
            for number, (name, arguments) in output.calls.items()
        ]
    elif (parser := ready.parsers[choice.index]) and not parser.may_be_text:
        found["content"] = None  # a truncated call is not text
    return found


# Streaming.


async def events(ready: Ready, pieces: Pieces) -> AsyncGenerator[bytes]:
    """Yield a streamed answer as server-sent events."""
    begun, clock = False, asyncio.get_running_loop().time
    shown_at = clock()
    held: list[list[Piece]] = [[] for _ in ready.choices]
    async with aclosing(pieces):
        async for piece in pieces:
            if piece is None:
                yield b": still generating\n\n"
            else:
                if not begun:
                    # Start all choices, in order, because the openai package assumes
                    # that the first choice that it sees is number 0.
                    for choice in ready.choices:
                        if first := _first_event(ready, choice):
                            yield first
                    begun = True
                number = piece.choice.index
                parser = ready.parsers[number]
                if parser is None:
                    yield _piece_event(ready, piece)
                    continue
                held[number].append(piece)
                for event in _parsed_events(ready, held[number], parser):
                    yield event
                    shown_at = clock()
                # The tokens of a long tool call may yield no event for a while.
                if clock() - shown_at >= KEEP_ALIVE_S:
                    yield b": still generating\n\n"
                    shown_at = clock()
    if ready.wanted.has_usage:
        yield event_of(
            {**ready.head(is_chunk=True), "choices": [], "usage": _usage(ready)}
        )


def _first_event(ready: Ready, choice: Choice) -> bytes:
    """Return the event that precedes a choice's first token; empty if not needed."""
    # This event is sent together with the first token of any choice, because clients
    # measure the time to first token by it.
    prompt = {"prompt_token_ids": list(choice.prompt)} if ready.wanted.has_ids else {}
    if ready.is_chat:
        delta = {"role": "assistant", "content": ""}
        return _event(ready, choice, delta, more=prompt)
    echo = ready.echoes[choice.index]
    return _event(ready, choice, echo, more=prompt) if echo or prompt else b""


def _parsed_events(
    ready: Ready, held: list[Piece], parser: AnswerParser
) -> Iterator[bytes]:
    """Yield the events of output that may have reasoning and tool calls."""
    # ``held``: pieces that no event includes yet, because they had no visible output.
    piece = held[-1]  # the only piece that is not yet parsed
    deltas: list[dict[str, Any]] = []
    thought_tokens = parser.thought_tokens
    for each in _parts(parser, piece):
        if isinstance(each, str):
            deltas.append({"content": each})
            continue
        if isinstance(each, Thought):
            if ready.wanted.has_reasoning:
                deltas.append({"reasoning": each.text})
            continue
        function = {"name": each.name} if each.name else {}
        call: dict[str, Any] = {"index": each.number}
        if each.name:
            call["id"] = ready.call_id(piece.choice.index, each.number)
            call["type"] = "function"
        call["function"] = {**function, "arguments": each.arguments}
        deltas.append({"tool_calls": [call]})
    if parser.thought_tokens > thought_tokens and not ready.wanted.has_reasoning:
        held.clear()  # omits the tokens of the reasoning, too
    for delta in deltas:
        yield _event(ready, piece.choice, delta, held)
        held.clear()
    item = held[0].item if len(held) >= MAX_HELD and not piece.finish else None
    if item is not None and item.logprob is not None:
        # Rendering the log probabilities of too many tokens at once would block the
        # event loop.
        yield _event(ready, piece.choice, {}, held)
        held.clear()
    if piece.finish:
        has_calls = parser.has_calls and not _is_cut(ready, piece.choice)
        finish = "tool_calls" if has_calls else piece.finish
        yield _event(ready, piece.choice, {}, held, finish)


def _piece_event(ready: Ready, piece: Piece) -> bytes:
    shown: Any = {"content": piece.text} if ready.is_chat else piece.text
    if ready.is_chat and not piece.text and piece.finish:
        shown = {}
    pieces = [] if piece.choice.is_prompt_only else [piece]
    return _event(ready, piece.choice, shown, pieces, piece.finish)


def _event(
    ready: Ready,
    choice: Choice,
    delta: Any,
    pieces: Sequence[Piece] = (),
    finish: str = "",
    more: Mapping[str, Any] = MappingProxyType({}),
) -> bytes:
    pieces = [piece for piece in pieces if piece.item is not None]
    items = [piece.item for piece in pieces if piece.item is not None]
    found: dict[str, Any] = {"index": choice.index}
    found["delta" if ready.is_chat else "text"] = delta
    logprobs = None
    if items and items[0].logprob is not None:
        before = len(ready.echoes[choice.index])
        offsets = [before + piece.offset for piece in pieces]
        logprobs = (
            chat_logprobs(ready.served.tokenizer, items)
            if ready.is_chat
            else text_logprobs(ready.served.tokenizer, items, offsets)
        )
    found |= {"logprobs": logprobs, "finish_reason": finish or None, **more}
    if ready.wanted.has_ids:
        found["token_ids"] = [item.token for item in items]
    chunk = {**ready.head(is_chunk=True), "choices": [found]}
    if ready.wanted.has_usage:
        chunk["usage"] = _usage(ready) if ready.wanted.has_usage_so_far else None
    if ready.is_chat and "prompt_token_ids" in more:
        chunk["prompt_token_ids"] = more["prompt_token_ids"]
    return event_of(chunk)


STREAM_PATH = "/v1/streams/"

OPENAI = Form(whole, events, stream_path=STREAM_PATH)
