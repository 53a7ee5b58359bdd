"""Preparation of a request: its prompts become tokens, within the model's limits."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from multiworld.errors import DeadlineExceededError, InvalidRequestError, wrong_field
from multiworld.serve.gateway.admission.authenticator import AdmittedRequest
from multiworld.serve.gateway.http.gateway import Gateway
from multiworld.serve.gateway.http.http_request import AnyRequest
from multiworld.serve.gateway.http.http_responses import timeout_of
from multiworld.serve.gateway.openai.choices import Choice
from multiworld.serve.gateway.openai.completions import (
    Structure,
    Wanted,
    check_fits,
    prompts_of,
)
from multiworld.serve.gateway.openai.reasoning import (
    LAST,
    AnswerParser,
    Reasoning,
    marks_of,
    reasoning_after,
)
from multiworld.serve.gateway.openai.request_fields import (
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
)
from multiworld.serve.gateway.openai.tools import BEGIN, END, CallParser, Family
from multiworld.serve.gateway.streams.stream import ENGINE_S, WAIT_S, TimeLimits
from multiworld.serve.spec.stage import Generation
from multiworld.serve.text.grammar import (
    after_reasoning,
    arguments_of,
    grammar_of_answer_or_calls,
    grammar_of_marked_calls,
)
from multiworld.serve.text.grammar_trials import TrialTokenizer, trials
from multiworld.serve.text.growing_text import GrowingText
from multiworld.serve.text.limits import longest_of
from multiworld.serve.text.tokenizer import Tokenizer, bytes_of

MAX_SCORES = 200_000  # prompt logprobs in one answer; each takes about 50 bytes of it


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str  # maybe that of a dedicated model
    generation: Generation
    tokenizer: Tokenizer
    version: str
    longest: int  # tokens of a sequence
    limits: TimeLimits
    family: Family | None
    has_controls: bool
    reasoning_marks: Sequence[str] | None  # of its spec
    wait_s: float = WAIT_S  # for a token, if a request has no deadline


@dataclass(frozen=True, slots=True)
class Kind:
    """What chats and text completions have of their own."""

    prefix: str  # of the id of an answer
    whole: str  # ``object`` of a whole answer
    chunk: str  # and of a chunk
    field: str  # of the request, with the prompt


CHAT = Kind("chatcmpl-", "chat.completion", "chat.completion.chunk", "messages")
TEXT = Kind("cmpl-", "text_completion", "text_completion", "prompt")


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that was checked against its model."""

    wanted: Wanted
    served: ServedModel
    choices: tuple[Choice, ...]
    kind: Kind
    echoes: tuple[str, ...]  # text that each choice begins with
    id: str
    made_at: int
    reasoning: Reasoning | None  # that the output may begin with
    parsers: tuple[AnswerParser | None, ...]  # of each choice; None: all is text

    @property
    def is_chat(self) -> bool:
        return self.kind is CHAT

    def head(self, *, is_chunk: bool = False) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.kind.chunk if is_chunk else self.kind.whole,
            "created": self.made_at,
            "model": self.wanted.model,
        }


async def served_model(
    gateway: Gateway, admitted: AdmittedRequest, name: str
) -> ServedModel:
    version, model = gateway.model(name, None, admitted.tenant)
    if model.generation is None:
        raise InvalidRequestError(
            f"model {name!r} generates no text; use /v1/embeddings or /v2",
            param="model",
        )
    name = gateway.route(name, admitted.tenant)
    # Before the wait: the version may be gone after it.
    whole = gateway.specs[name, version]
    spec = whole.generation
    assert spec is not None
    start_s = whole.start_s or (ENGINE_S if whole.engine else 0.0)
    tokenizer: Tokenizer = await gateway.text(name, version, model)
    return ServedModel(
        name,
        model.generation,
        tokenizer,
        version,
        longest_of(spec, model.generation),
        TimeLimits(spec.first_token_s, spec.between_tokens_s),
        spec.tool_call_parser,
        spec.control_tokens_in_messages,
        spec.reasoning_marks,
        max(WAIT_S, start_s),
    )


async def prepare_chat(
    gateway: Gateway, admitted: AdmittedRequest, asked: ChatBody, wanted: Wanted
) -> Ready:
    served = await served_model(gateway, admitted, asked.model)
    tools, options = _shown_tools(wanted), asked.chat_template_kwargs or {}
    size = bytes_of((asked.messages, tools, options))
    served.tokenizer.check_length(size, served.longest, "messages")
    encode = partial(
        served.tokenizer.chat,
        asked.messages,
        served.longest,
        begins_answer=asked.add_generation_prompt is not False,
        tools=tools,
        options=options,
        effort=asked.reasoning_effort,
        has_controls=served.has_controls,
    )
    tokens = await _encoded(gateway, admitted, size, encode)
    reasoning = _reasoning_after(tokens, served)
    return await _ready(gateway, admitted, wanted, served, [tokens], CHAT, reasoning)


def _reasoning_after(prompt: Sequence[int], served: ServedModel) -> Reasoning | None:
    tokenizer = served.tokenizer
    marks = marks_of(served.reasoning_marks, tokenizer.template.texts)
    if marks is None:
        return None
    last = tokenizer.decode(prompt[-LAST:], skips_special=False)
    found = reasoning_after(marks, last)
    if found is None:
        return None
    begin, end = map(tokenizer.added.get, marks)
    return replace(found, begin_token=begin, end_token=end)


async def prepare_completion(
    gateway: Gateway, admitted: AdmittedRequest, asked: CompletionBody, wanted: Wanted
) -> Ready:
    served = await served_model(gateway, admitted, asked.model)
    tokenizer = served.tokenizer
    prompts: Sequence[str | list[int]] = prompts_of(asked.prompt)
    _check_choices(len(prompts), wanted.n)
    has_special = asked.add_special_tokens is not False
    sizes = list(map(bytes_of, prompts))
    for size in sizes:
        tokenizer.check_length(size, served.longest)
    tokens: list[Sequence[int]] = []
    for prompt, size in zip(prompts, sizes, strict=True):
        if isinstance(prompt, str):
            encode = partial(tokenizer.encode, prompt, has_special=has_special)
            tokens.append(await _encoded(gateway, admitted, size, encode))
        else:
            tokens.append(prompt)
        if len(tokens[-1]) > served.longest:
            break  # and is refused
    return await _ready(gateway, admitted, wanted, served, tokens, TEXT)


async def _encoded(
    gateway: Gateway,
    admitted: AdmittedRequest,
    size: int,
    encode: Callable[[], list[int]],
) -> list[int]:
    """Encode a text in a thread; tenants take turns, as it may take a second."""
    work = gateway.encoding.submit(admitted.tenant.share, 1.0 + size, encode)
    return await asyncio.wrap_future(work)


def _shown_tools(wanted: Wanted) -> list[dict[str, Any]]:
    if wanted.calling is None:
        return []
    try:
        found: list[dict[str, Any]] = msgspec.to_builtins(wanted.calling.tools)
    except RecursionError:
        raise wrong_field("tools", "are nested too deeply") from None
    for tool in found:
        tool["function"] = {k: v for k, v in tool["function"].items() if v is not None}
    return found


def _check_choices(prompts: int, n: int) -> None:
    if prompts * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"prompts times n must be at most {MAX_CHOICES}",
            param="n",
            code="invalid_value",
        )


def _check_scores(prompts: Sequence[Sequence[int]], wanted: Wanted) -> None:
    per_token = wanted.sampling.prompt_logprobs
    if per_token is None:
        return
    scores = sum(map(len, prompts)) * wanted.n * (1 + per_token)
    if scores > MAX_SCORES:
        raise InvalidRequestError(
            f"echo with logprobs would return {scores} probabilities; at most "
            f"{MAX_SCORES} fit into one answer",
            param="logprobs",
            code="invalid_value",
        )


def _with_defaults(wanted: Wanted, generation: Generation) -> Wanted:
    """Use the model's own defaults for fields that the request does not give."""
    own = {k: v for k, v in generation.defaults.items() if k not in wanted.given}
    if not own:
        return wanted
    return replace(wanted, sampling=msgspec.structs.replace(wanted.sampling, **own))


def _with_calls(wanted: Wanted, served: ServedModel) -> Structure | None:
    """Return the structure of output that may have text and calls of tools."""
    calling, structure = wanted.calling, wanted.structure
    assert calling is not None
    token_id = served.tokenizer.fast.token_to_id
    begin, end = token_id(BEGIN), token_id(END)
    forms = calling.forms(is_strict=True)
    is_hermes = served.family == "hermes"
    if structure is not None:
        if wanted.schema is None or not is_hermes:
            rule = (
                "cannot be called beside this structure: only beside a JSON schema, "
                'with tool_call_parser "hermes"; set tool_choice to none or required'
            )
            raise wrong_field("tools", rule, "unsupported_value")
        made_by = grammar_of_answer_or_calls
        marks = BEGIN if begin is None else begin, END if end is None else end
        single = calling.is_single
        return partial(made_by, wanted.schema, forms, marks, is_single=single)
    is_marked = is_hermes and not wanted.sampling.ignore_eos
    if calling.is_strict and is_marked and begin is not None and end is not None:
        ends = served.generation.end_tokens
        return partial(grammar_of_marked_calls, forms, begin, end, ends)
    return None  # calls that do not fit their schema are possible


def _shown_marks(
    wanted: Wanted, served: ServedModel, reasoning: Reasoning | None
) -> frozenset[int]:
    """Return the tokens that mark parts of the output; control tokens or not."""
    marks = [] if reasoning is None else [reasoning.begin, reasoning.end]
    is_free = wanted.calling is not None and wanted.calling.is_free
    if is_free and served.family == "hermes":
        marks += [BEGIN, END]
    added = served.tokenizer.added
    return frozenset(added[mark] for mark in marks if mark in added)


def timed(wanted: Wanted, request: AnyRequest) -> Wanted:
    """Return what a client wants, with the timeout of its headers; check it."""
    return replace(wanted, timeout_s=timeout_of(request, wanted.timeout_s))


async def _compiled(
    gateway: Gateway,
    admitted: AdmittedRequest,
    wanted: Wanted,
    served: ServedModel,
    structure: Structure,
    reasoning: Reasoning | None,
) -> str:
    """Return a structure's grammar; compiling takes seconds, so tenants take turns."""
    limit_s = wanted.timeout_s
    if limit_s is None:
        limit_s = min(WAIT_S, gateway.deadline_s(wanted.model, admitted.tenant))
    call = partial(_tried, structure, served, reasoning)
    work = gateway.compiling.submit(admitted.tenant.share, 1.0, call)
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.wrap_future(work)
    except TimeoutError as error:
        raise DeadlineExceededError(
            f"structure was not compiled within {limit_s:g} s"
        ) from error


def _tried(
    structure: Structure, served: ServedModel, reasoning: Reasoning | None
) -> str:
    made_of = partial(arguments_of, served.tokenizer.fast, served.generation)
    model = served.generation
    name = f"{served.tokenizer.digest} {model.vocabulary} {list(model.end_tokens)}"
    tokenizer = TrialTokenizer(name, made_of)
    why_not = partial(trials().why_not, tokenizer)
    if reasoning is None:
        return structure(trial=why_not)
    whole = partial(
        after_reasoning,
        marks=reasoning.marks,
        ends=model.end_tokens,
        is_begun=reasoning.is_begun,
    )
    # By itself, too: the first is not asked for the answer until the reasoning is over.
    return whole(structure(trial=lambda g: why_not(g) or why_not(whole(g))))


async def _ready(
    gateway: Gateway,
    admitted: AdmittedRequest,
    wanted: Wanted,
    served: ServedModel,
    prompts: Sequence[Sequence[int]],
    kind: Kind,
    reasoning: Reasoning | None = None,
) -> Ready:
    wanted = _with_defaults(wanted, served.generation)
    if wanted.calling is not None and wanted.calling.is_free and served.family:
        wanted = replace(wanted, structure=_with_calls(wanted, served))
    if wanted.structure is not None:
        structure = wanted.structure
        grammar = await _compiled(
            gateway, admitted, wanted, served, structure, reasoning
        )
        sampling = msgspec.structs.replace(wanted.sampling, grammar=grammar)
        wanted = replace(wanted, sampling=sampling)
    sampling, calling = wanted.sampling, wanted.calling
    if calling is not None and calling.is_free and served.family is None:
        raise InvalidRequestError(
            "this model has no tool_call_parser in its spec; name a tool or use "
            "tool_choice: required",
            param="tools",
            code="unsupported_value",
        )
    vocabulary, tokenizer = served.generation.vocabulary, served.tokenizer
    for tokens in prompts:
        low, high = min(tokens, default=0), max(tokens, default=0)
        if low < 0 or high >= vocabulary:
            raise InvalidRequestError(
                f"prompt has tokens from {low} to {high}; the vocabulary has 0 to "
                f"{vocabulary - 1}",
                param="prompt",
                code="invalid_value",
            )
        sampling = check_fits(
            len(tokens),
            wanted.sampling,
            served.longest,
            vocabulary,
            kind.field,
        )
    shown = _shown_marks(wanted, served, reasoning)
    choices = tuple(
        Choice(
            index,
            prompts[index // wanted.n],
            GrowingText(
                tokenizer,
                wanted.stop,
                skips_special=wanted.skips_special,
                shown=shown,
                min_tokens=wanted.sampling.min_tokens,
                before=() if kind is CHAT else prompts[index // wanted.n],
            ),
            wanted.is_prompt_only,
            keeps_items=not wanted.is_streamed,
        )
        for index in range(len(prompts) * wanted.n)
    )
    admitted.rows = len(choices)
    _check_scores(prompts, wanted)
    echoes = [""] * len(prompts)
    if wanted.echo:
        echoes = [
            await asyncio.to_thread(
                tokenizer.decode, one, skips_special=wanted.skips_special
            )
            for one in prompts
        ]
    return Ready(
        replace(wanted, sampling=sampling),
        served,
        choices,
        kind,
        tuple(echoes[index // wanted.n] for index in range(len(choices))),
        kind.prefix + secrets.token_hex(12),
        int(time.time()),
        reasoning,
        tuple(_parser(wanted, served, reasoning) for _ in choices),
    )


def _parser(
    wanted: Wanted, served: ServedModel, reasoning: Reasoning | None
) -> AnswerParser | None:
    if wanted.calling is None and reasoning is None:
        return None
    calling = wanted.calling
    calls = None if calling is None else CallParser(calling, served.family)
    return AnswerParser(reasoning, calls)
