"""Preparation of a request: encode prompts, and apply the model's limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from multiworld.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ServeError,
    wrong_field,
)
from multiworld.serve.deadlines import ENGINE_S, WAIT_S
from multiworld.serve.gateway.http.answer_record import AnswerRecord, unrecorded
from multiworld.serve.gateway.http.calls import AdmittedCall
from multiworld.serve.gateway.http.gateway import Gateway
from multiworld.serve.gateway.http.http_responses import timeout_of
from multiworld.serve.gateway.http.preparations import Preparation
from multiworld.serve.gateway.openai.choices import Choice, digest_of
from multiworld.serve.gateway.openai.completion_requests import (
    Structure,
    Wanted,
    chat_of,
    check_fits,
    completion_of,
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
from multiworld.serve.gateway.openai.tool_calls import BEGIN, END, CallParser, Family
from multiworld.serve.gateway.streams.stream import TimeLimits
from multiworld.serve.spec.stage import Generation, Model
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
from multiworld.serve.tracing.request_trace import CURRENT

# Minimum seconds left until the deadline, however long the preparation took.
MIN_DEADLINE_S = 0.001
MAX_SCORES = 200_000  # maximum prompt logprobs in one answer, of about 50 bytes each


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str  # name of the shared or the dedicated model
    generation: Generation
    tokenizer: Tokenizer
    version: str
    longest: int  # maximum tokens of a sequence
    limits: TimeLimits
    family: Family | None
    has_controls: bool
    reasoning_marks: Sequence[str] | None  # as given in the spec
    # Default maximum seconds to wait for a token, if the request has no deadline.
    wait_s: float = WAIT_S


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a request as tokens, and the reasoning that may follow them."""

    tokens: Sequence[Sequence[int]]
    reasoning: Reasoning | None = None
    texts: Sequence[str | None] = ()  # as the client gave them; None: it gave tokens


@dataclass(frozen=True, slots=True)
class CompletionKind:
    """The differences between chats and text completions."""

    prefix: str  # prefix of an answer's id
    whole: str  # field ``object`` of a whole answer
    chunk: str  # field ``object`` of a chunk
    field: str  # name of the request field with the prompt
    parse: Callable[..., tuple[Any, Wanted]]  # parses a body
    encode: Callable[[AdmittedCall, ServedModel, Any, Wanted], Awaitable[Prompts]]


@dataclass(frozen=True, slots=True)
class Ready:
    """A prepared request, checked against its model."""

    wanted: Wanted
    served: ServedModel
    choices: tuple[Choice, ...]
    kind: CompletionKind
    echoes: tuple[str, ...]  # text with which each choice begins
    id: str
    made_at: int
    reasoning: Reasoning | None  # reasoning with which the output may begin
    parsers: tuple[AnswerParser | None, ...]  # by choice; None: all output is text
    record: AnswerRecord = field(default_factory=unrecorded)

    @property
    def is_chat(self) -> bool:
        return self.kind is CHAT

    def call_id(self, choice: int, number: int) -> str:
        """Return the id of a call; Mistral's templates require 9 letters and digits."""
        return self.record.token(f"call {choice} {number}", 5)[:9]

    def head(self, *, is_chunk: bool = False) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.kind.chunk if is_chunk else self.kind.whole,
            "created": self.made_at,
            "model": self.wanted.model,
        }


async def prepared(
    call: AdmittedCall, kind: CompletionKind, asked: Any, wanted: Wanted
) -> Ready:
    """Prepare a request for the active version; start over if the version changes."""
    preparing = call.gateway.preparations.preparing
    with preparing(call.tenant.share.tenant, wanted.model) as one:
        return await _prepared(call, kind, asked, wanted, one)


async def _prepared(
    call: AdmittedCall,
    kind: CompletionKind,
    asked: Any,
    wanted: Wanted,
    one: Preparation,
) -> Ready:
    gateway, name, tenant = call.gateway, wanted.model, call.tenant
    call.admitted.model = name
    began_at = gateway.authenticator.clock()
    while True:
        served = await served_model(call, name)
        one.model = served.name
        timeout_s = timeout_of(call.request, wanted.timeout_s)
        detach_s = _detach_s(gateway, wanted)
        timed = replace(wanted, timeout_s=timeout_s, detach_s=detach_s)
        prompts = await kind.encode(call, served, asked, timed)
        ready = await _ready(call, timed, served, prompts, kind, one)
        await gateway.check_poison(
            call.admitted, (name, served.version), partial(_digest, ready)
        )
        version, _ = version_of(call, name)
        if (version, gateway.route(name, tenant)) == (served.version, served.name):
            break
    if ready.wanted.structure is None:
        return ready
    if timeout_s is None:
        timeout_s = gateway.deadline_s(name, tenant)
    spent_s = gateway.authenticator.clock() - began_at  # compiling may take seconds
    timeout_s = max(MIN_DEADLINE_S, timeout_s - spent_s)
    return replace(ready, wanted=replace(ready.wanted, timeout_s=timeout_s))


def _detach_s(gateway: Gateway, wanted: Wanted) -> float:
    """Return the seconds for which a stream without a client is kept."""
    if wanted.detach_s is None:
        return gateway.detach_s
    if not 0 <= wanted.detach_s <= gateway.max_detach_s:
        rule = f"must be from 0 to {gateway.max_detach_s:g}"
        raise wrong_field("detach_s", rule)
    return wanted.detach_s


def version_of(call: AdmittedCall, name: str) -> tuple[str, Model]:
    """Return a request's version: its first one, if another gateway began it."""
    drawn = call.record.drawn
    begun = drawn.version, drawn.identity
    return call.gateway.model(name, call.version, call.tenant, *begun)


async def _digest(ready: Ready) -> str:
    return digest_of(ready.choices, ready.wanted.sampling)


async def served_model(call: AdmittedCall, name: str) -> ServedModel:
    gateway = call.gateway
    version, model = version_of(call, name)
    if model.generation is None:
        raise InvalidRequestError(
            f"model {name!r} generates no text; use /v1/embeddings or /v2",
            param="model",
        )
    name = gateway.route(name, call.tenant)
    # Read the spec before the ``await``, after which the version may be gone.
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


async def _chat_prompt(
    call: AdmittedCall, served: ServedModel, asked: ChatBody, wanted: Wanted
) -> Prompts:
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
    tokens = await call.gateway.encoded(call.tenant.share, size, encode)
    return Prompts([tokens], _reasoning_after(tokens, served))


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


async def _text_prompts(
    call: AdmittedCall, served: ServedModel, asked: CompletionBody, wanted: Wanted
) -> Prompts:
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
            share = call.tenant.share
            tokens.append(await call.gateway.encoded(share, size, encode))
        else:
            tokens.append(prompt)
        if len(tokens[-1]) > served.longest:
            break  # the request will be refused
    return Prompts(tokens, texts=[p if isinstance(p, str) else None for p in prompts])


CHAT = CompletionKind(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    "messages",
    chat_of,
    _chat_prompt,
)
TEXT = CompletionKind(
    "cmpl-",
    "text_completion",
    "text_completion",
    "prompt",
    completion_of,
    _text_prompts,
)


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
        rule = f"times the number of prompts must be at most {MAX_CHOICES}"
        raise wrong_field("n", rule)


def _check_scores(prompts: Sequence[Sequence[int]], wanted: Wanted) -> None:
    per_token = wanted.sampling.prompt_logprobs
    if per_token is None:
        return
    scores = sum(map(len, prompts)) * wanted.n * (1 + per_token)
    if scores > MAX_SCORES:
        rule = (
            f"with echo would return {scores} log-probabilities; at most {MAX_SCORES} "
            "fit into one answer"
        )
        raise wrong_field("logprobs", rule)


def _with_defaults(wanted: Wanted, generation: Generation) -> Wanted:
    """Apply the model's own defaults to fields that the request does not set."""
    own = {k: v for k, v in generation.defaults.items() if k not in wanted.given}
    if not own:
        return wanted
    return replace(wanted, sampling=msgspec.structs.replace(wanted.sampling, **own))


def _with_calls(wanted: Wanted, served: ServedModel) -> Structure | None:
    """Return the structure of output that may have text and tool calls."""
    calling, structure = wanted.calling, wanted.structure
    assert calling is not None
    token_id = served.tokenizer.fast.token_to_id
    begin, end = token_id(BEGIN), token_id(END)
    forms = calling.forms(is_strict=True)
    is_hermes = served.family == "hermes"
    if structure is not None:
        if wanted.schema is None or not is_hermes:
            rule = (
                "cannot be combined with this structured output, only with a JSON "
                'schema and tool_call_parser "hermes"; set tool_choice to none or '
                "required"
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
    return None  # no structure: calls may violate their schemas


def _shown_marks(
    wanted: Wanted, served: ServedModel, reasoning: Reasoning | None
) -> frozenset[int]:
    """Return the tokens that delimit parts of the output, and must not be skipped."""
    marks = [] if reasoning is None else [reasoning.begin, reasoning.end]
    is_free = wanted.calling is not None and wanted.calling.is_free
    if is_free and served.family == "hermes":
        marks += [BEGIN, END]
    added = served.tokenizer.added
    return frozenset(added[mark] for mark in marks if mark in added)


async def _compiled(
    call: AdmittedCall,
    wanted: Wanted,
    served: ServedModel,
    structure: Structure,
    reasoning: Reasoning | None,
) -> str:
    """Compile a structure to a grammar, in a thread, in fair order among tenants."""
    limit_s = wanted.timeout_s
    if limit_s is None:
        limit_s = min(WAIT_S, call.gateway.deadline_s(wanted.model, call.tenant))
    compile_it = partial(_tried, structure, served, reasoning)
    clock, trace = call.gateway.authenticator.clock, CURRENT.get()
    began_at, failure = clock(), ""
    work = call.gateway.compiling.submit(call.tenant.share, 1.0, compile_it)
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.wrap_future(work)
    except TimeoutError as error:
        failure = f"structure was not compiled within {limit_s:g} s"
        raise DeadlineExceededError(failure) from error
    except ServeError as error:
        failure = type(error).__name__
        raise
    finally:
        if trace is not None:
            trace.add("grammar", began_at, clock(), {}, failure)


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
    # Also try the answer's grammar on its own, because a trial of the whole grammar
    # starts with the reasoning and does not reach the answer.
    return whole(structure(trial=lambda g: why_not(g) or why_not(whole(g))))


async def _ready(
    call: AdmittedCall,
    wanted: Wanted,
    served: ServedModel,
    given: Prompts,
    kind: CompletionKind,
    one: Preparation,
) -> Ready:
    prompts, reasoning, record = given.tokens, given.reasoning, call.record
    wanted = _with_defaults(wanted, served.generation)
    if not wanted.has_seed:
        sampling = msgspec.structs.replace(wanted.sampling, seed=record.seed)
        wanted = replace(wanted, sampling=sampling)
    if wanted.calling is not None and wanted.calling.is_free and served.family:
        wanted = replace(wanted, structure=_with_calls(wanted, served))
    if wanted.structure is not None:
        structure, one.is_compiling = wanted.structure, True
        grammar = await _compiled(call, wanted, served, structure, reasoning)
        one.is_compiling = False
        sampling = msgspec.structs.replace(wanted.sampling, grammar=grammar)
        wanted = replace(wanted, sampling=sampling)
    sampling, calling = wanted.sampling, wanted.calling
    if calling is not None and calling.is_free and served.family is None:
        rule = (
            "need a tool_call_parser in this model's spec; name a tool or use "
            "tool_choice: required"
        )
        raise wrong_field("tools", rule, "unsupported_value")
    vocabulary, tokenizer = served.generation.vocabulary, served.tokenizer
    for tokens in prompts:
        low, high = min(tokens, default=0), max(tokens, default=0)
        if low < 0 or high >= vocabulary:
            known = f"the vocabulary has 0 to {vocabulary - 1}"
            raise wrong_field("prompt", f"has tokens from {low} to {high}; {known}")
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
    call.admitted.rows = len(choices)
    _check_scores(prompts, wanted)
    echoes = [""] * len(prompts)
    if wanted.echo:
        # With its control tokens: clients remove the prompt by its length.
        echoes = [
            await asyncio.to_thread(tokenizer.decode, one, skips_special=False)
            if text is None
            else text
            for one, text in zip(prompts, given.texts, strict=False)
        ]
    return Ready(
        replace(wanted, sampling=sampling),
        served,
        choices,
        kind,
        tuple(echoes[index // wanted.n] for index in range(len(choices))),
        kind.prefix + record.token("answer"),
        int(record.drawn.made_at),
        reasoning,
        tuple(_parser(wanted, served, reasoning) for _ in choices),
        record,
    )


def _parser(
    wanted: Wanted, served: ServedModel, reasoning: Reasoning | None
) -> AnswerParser | None:
    if wanted.calling is None and reasoning is None:
        return None
    calling = wanted.calling
    calls = None if calling is None else CallParser(calling, served.family)
    return AnswerParser(reasoning, calls)
