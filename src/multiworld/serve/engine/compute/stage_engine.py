"""The engine of one replica, in its compute thread: computes its stage in steps."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from multiworld.errors import InvalidRequestError
from multiworld.serve.engine.compute.batch_invariant_attention import (
    PIECE,
    InvariantAttention,
)
from multiworld.serve.engine.compute.batch_invariant_functions import (
    make_functions_invariant,
)
from multiworld.serve.engine.compute.batch_invariant_layers import (
    make_elements_invariant,
    make_linears_invariant,
    make_routers_invariant,
)
from multiworld.serve.engine.compute.compiled_attention import (
    compiled,
    fastest,
)
from multiworld.serve.engine.compute.compiled_layers import compile_layers
from multiworld.serve.engine.compute.device_health import exit_if_broken
from multiworld.serve.engine.compute.kv_cache import (
    KvCache,
    MissingTokensError,
    Rows,
)
from multiworld.serve.engine.compute.layer_trial import calls_functions, check_layers
from multiworld.serve.engine.compute.paged_kv_cache import PagedKvCache
from multiworld.serve.engine.compute.prefix_blocks import Block, BlockSpan
from multiworld.serve.engine.compute.sampler import (
    Choice,
    TokenHistory,
    finish_of,
    sample,
)
from multiworld.serve.engine.compute.step_graphs import StepGraphs, recorder
from multiworld.serve.engine.compute.transfers import HOST, Transfers
from multiworld.serve.engine.models.experts import split_experts
from multiworld.serve.engine.models.packed_linear import pack_linears, unmap
from multiworld.serve.spec.stage import Generation
from multiworld.serve.text.grammar import Matcher
from multiworld.serve.wire.generation_messages import (
    SequenceStart,
    StepPart,
    TokenItem,
)
from multiworld.serve.wire.protocol import Key, StreamId

logger = logging.getLogger("multiworld.serve")

# Maximum number of prompt rows that are scored in one call, because the call copies
# their logits.
SCORED_AT_ONCE = 32

# The signature of ``DecoderStage.forward``: (rows, positions, attention, wanted) to
# hidden states, or logits in the last stage. Sampling overwrites the logits.
StageFunction = Callable[[Tensor, Tensor, object, Tensor], Tensor]


@dataclass(slots=True)
class Tail:
    """State of a sequence at the last stage."""

    start: SequenceStart
    history: TokenHistory
    matcher: Matcher | None = None
    # Log-probabilities of the prompt's tokens that are scored so far, if they are
    # requested.
    scored: list[tuple[float, tuple[tuple[int, float], ...]]] = field(
        default_factory=list
    )

    def scores(self, part: StepPart) -> bool:
        """Return whether a part contains prompt rows whose next tokens are scored."""
        is_asked = self.start.sampling.prompt_logprobs is not None
        return is_asked and part.begin < self.start.prompt - 1

    def prepare(self, part: StepPart) -> Tensor | None:
        """Return a mask of the tokens that a structure allows next; None: all."""
        count = part.begin + part.count
        self.history.truncate(count)  # tokens after these are sampled again
        if self.matcher is None:
            return None
        self.matcher.truncate(count - self.start.prompt)
        return self.matcher.allowed(self.history.tokens, self.start.prompt)

    def append(self, key: Key, choice: Choice) -> TokenItem:
        """Append a sampled token; return its item for the gateway."""
        index, sampling = self.history.index, self.start.sampling
        self.history.append(choice.token)
        finish = finish_of(choice.token, index + 1, sampling, self.history.ends)
        prompt = tuple(self.scored) if index == 0 else ()
        return TokenItem(
            key, index, choice.token, finish, choice.logprob, choice.top, prompt
        )


@dataclass(frozen=True, slots=True)
class Computed:
    """Results of a step."""

    parts: tuple[StepPart, ...]
    # Hidden states of all rows, [rows, hidden]; None in the last stage.
    hidden: Tensor | None = None
    tokens: tuple[TokenItem, ...] = ()
    # Sequences that failed, with the errors that the model raised for them.
    failed: tuple[tuple[Key, Exception], ...] = ()
    # Copies of blocks to cache. They lack the output rows that earlier steps computed.
    blocks: tuple[tuple[BlockSpan, Block], ...] = ()

    def rows(self) -> dict[Key, Tensor]:
        """Return the hidden states of each part, [rows, hidden]."""
        if self.hidden is None:
            return {}
        pieces = torch.split(self.hidden, [part.count for part in self.parts])
        return {p.key: rows for p, rows in zip(self.parts, pieces, strict=True)}


@dataclass(frozen=True, slots=True)
class Chores:
    """Tasks for an engine before its next step."""

    free: Sequence[StreamId] = ()
    # The KV blocks of these sequences are freed, and recomputed later.
    drop: Sequence[StreamId] = ()
    # Sequences that start here, or whose next attempt starts.
    open: Sequence[tuple[SequenceStart, Matcher | None]] = ()
    # By stream: the cached blocks with which it starts, and their number of tokens.
    restore: Mapping[StreamId, tuple[Sequence[Block], int]] = field(
        default_factory=dict
    )


def engine_of(
    function: StageFunction,
    *,
    is_last: bool,
    model: Generation,
    # If True, raises ``ModelFailedError`` unless determinism can be guaranteed.
    is_deterministic: bool,
    # Copies tensors to the device that the stage was loaded on.
    transfers: Transfers = HOST,
    tokens: int = 0,  # initial capacity of the KV cache in tokens, on a GPU
) -> StageEngine:
    """Return the engine of a loaded stage; on a CPU its weights are packed."""
    if not transfers.is_host:
        paged = PagedKvCache(tokens=tokens, transfers=transfers)
        graphs = None
        if getattr(function, "is_recordable", False):
            graphs = StepGraphs(function, paged, recorder(transfers.device))
        return StageEngine(function, is_last, model, paged, transfers, graphs)
    with torch.inference_mode():
        if isinstance(function, nn.Module):
            split_experts(function)
            pack_linears(function)
            unmap(function)
            if is_deterministic:
                make_linears_invariant(function)
                make_routers_invariant(function)
                make_elements_invariant(function)
            if hasattr(function, "attending"):
                compiled_layers = compile_layers(function)
                logger.info("compiled layers: %d", compiled_layers)
    if not is_deterministic:
        cache = KvCache(attention=fastest)
        return StageEngine(function, is_last, model, cache, transfers)
    # Use the largest granule until the first step sets the granule.
    attention = compiled(InvariantAttention)
    make = functools.partial(KvCache, attention=attention, granule=PIECE)
    has_example = hasattr(function, "example")
    if isinstance(function, nn.Module):
        if not has_example or calls_functions(function, make):
            make_functions_invariant(function)
        if has_example:
            check_layers(function, make)
    return StageEngine(function, is_last, model, make())


@dataclass(slots=True)
class StageEngine:
    function: StageFunction
    is_last: bool
    model: Generation
    cache: KvCache | PagedKvCache = field(default_factory=KvCache)
    transfers: Transfers = HOST
    graphs: StepGraphs | None = None
    _tails: dict[StreamId, Tail] = field(default_factory=dict)

    def tidy(self, chores: Chores) -> None:
        for stream in chores.free:
            self.cache.free(stream)
            self._tails.pop(stream, None)
        for stream in chores.drop:
            self.cache.free(stream)
        for stream, (blocks, tokens) in chores.restore.items():
            self.cache.restore(stream, [block.layers for block in blocks], tokens)
        for start, matcher in chores.open if self.is_last else ():
            self._open(start, matcher)

    def _open(self, start: SequenceStart, matcher: Matcher | None) -> None:
        sampling = start.sampling
        own = () if sampling.ignore_eos else self.model.end_tokens
        ends = (*own, *sampling.stop_token_ids)
        history = TokenHistory(sampling, start.tokens, start.prompt, ends)
        tail = Tail(start, history, matcher)
        known = self._tails.get(start.key[:2])
        if known is not None and start.previous >= 0:
            tail.scored = known.scored
        self._tails[start.key[:2]] = tail

    def compute(self, parts: Sequence[StepPart], rows: Tensor) -> Computed:
        """Compute a step; if it fails, compute each of its parts separately."""
        # ``rows`` are token ids, [rows], or hidden states, [rows, hidden].
        is_retried = False
        try:
            with torch.inference_mode():
                return self._compute(parts, rows)
        except Exception as error:
            exit_if_broken(self.transfers.device, error)
            if isinstance(error, torch.OutOfMemoryError) and self.graphs is not None:
                is_retried = self.graphs.clear()  # True if that freed memory
            if len(parts) == 1 and not is_retried:
                _log(error)
                return Computed((), failed=((parts[0].key, error),))
        if is_retried:
            return self.compute(parts, rows)
        offset, done = 0, []
        for part in parts:
            done.append(self.compute([part], rows[offset : offset + part.count]))
            offset += part.count
        found = [one.hidden for one in done if one.hidden is not None]
        return Computed(
            tuple(part for one in done for part in one.parts),
            torch.cat(found) if found else None,
            tuple(token for one in done for token in one.tokens),
            tuple(failure for one in done for failure in one.failed),
        )

    def with_blocks(self, found: Computed, spans: Sequence[BlockSpan]) -> Computed:
        """Return the results of a step with copies of the blocks that it completed."""
        # Call this before the next ``tidy``, which may free the memory of the blocks.
        parts, outputs = {part.key: part for part in found.parts}, found.rows()
        blocks: list[tuple[BlockSpan, Block]] = []
        for span in spans:
            part, rows = parts.get(span.key), outputs.get(span.key)
            if part is None:
                continue  # computing this part failed
            if rows is not None:
                first = max(0, span.begin - part.begin)
                rows = rows[first : span.end - part.begin].clone()
            layers = self.cache.copied(span.key[:2], span.begin, span.end)
            blocks.append((span, Block(layers, rows)))
        return replace(found, blocks=tuple(blocks))

    def _compute(self, parts: Sequence[StepPart], rows: Tensor) -> Computed:
        rows_of = self._wanted(parts) if self.is_last else []
        flat = [row for each in rows_of for row in each]
        found = self.transfers.download(self._outputs(parts, rows, flat))
        if not self.is_last:
            return Computed(tuple(parts), hidden=found)
        if found.shape != (len(flat), self.model.vocabulary):
            raise ValueError(
                f"the last stage returned logits of shape {list(found.shape)}; return "
                f"[wanted, vocabulary], here {[len(flat), self.model.vocabulary]}"
            )
        return self._sampled(parts, rows_of, found)

    def _outputs(
        self, parts: Sequence[StepPart], rows: Tensor, wanted: Sequence[int]
    ) -> Tensor:
        """Return hidden states of all rows, or logits of the ``wanted`` rows."""
        sequences = [Rows(p.key[:2], p.begin, p.count) for p in parts]
        if self.graphs is not None and (not self.is_last or len(wanted) == len(rows)):
            found = self.graphs.compute(sequences, rows)
            if found is not None:
                return found
        positions = torch.cat([torch.arange(p.begin, p.begin + p.count) for p in parts])
        attention = self.cache.step(sequences)
        upload = self.transfers.upload
        given = upload(rows), upload(positions), attention
        return self.function(*given, upload(torch.tensor(wanted, dtype=torch.int64)))

    def _sampled(
        self, parts: Sequence[StepPart], rows_of: Sequence[Sequence[int]], found: Tensor
    ) -> Computed:
        """Score prompts, and sample the next tokens from the logits of wanted rows."""
        failed: dict[Key, Exception] = {}
        asking: list[tuple[StepPart, int, Tensor | None]] = []
        end = 0
        for part, each in zip(parts, rows_of, strict=True):
            begin, end = end, end + len(each)
            tail = self._tails[part.key[:2]]
            try:
                if tail.scores(part):
                    self._score(part, found[begin:end])
                if part.samples:
                    asking.append((part, end - 1, tail.prepare(part)))
            except Exception as error:  # an error here fails only this sequence
                failed[part.key] = error
        last = [row for _, row, _ in asking]
        chosen = sample(
            found.contiguous() if len(last) == len(found) else found[last],
            [self._tails[part.key[:2]].history for part, _, _ in asking],
            [mask for _, _, mask in asking],
        )
        tokens: list[TokenItem] = []
        for (part, _, _), one in zip(asking, chosen, strict=True):
            if isinstance(one, ValueError):
                failed[part.key] = one
            else:
                tokens.append(self._tails[part.key[:2]].append(part.key, one))
        for failure in failed.values():
            _log(failure)
        done = tuple(part for part in parts if part.key not in failed)
        return Computed(done, None, tuple(tokens), tuple(failed.items()))

    def _wanted(self, parts: Sequence[StepPart]) -> list[Sequence[int]]:
        """Return the rows of each part whose logits are needed."""
        found: list[Sequence[int]] = []
        end = 0
        for part in parts:
            end += part.count
            if self._tails[part.key[:2]].scores(part):
                found.append(range(end - part.count, end))
            else:
                found.append([end - 1] if part.samples else [])
        return found

    def _score(self, part: StepPart, logits: Tensor) -> None:
        """Record the log-probabilities of the prompt tokens that follow these rows."""
        tail = self._tails[part.key[:2]]
        del tail.scored[part.begin :]  # this and later tokens are scored again
        most = tail.start.sampling.prompt_logprobs or 0
        end = min(part.begin + part.count, tail.start.prompt - 1)
        for begin in range(part.begin, end, SCORED_AT_ONCE):
            stop = min(begin + SCORED_AT_ONCE, end)
            rows = logits[begin - part.begin : stop - part.begin].log_softmax(-1)
            tokens = torch.tensor(tail.history.tokens[begin + 1 : stop + 1])
            own = rows.gather(-1, tokens[:, None])[:, 0].tolist()
            top = rows.topk(most)
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            for logprob, (ids, values) in zip(own, pairs, strict=True):
                likeliest = tuple(zip(ids, values, strict=True))
                tail.scored.append((logprob, likeliest))


def _log(error: Exception) -> None:
    """Log why a sequence failed, unless that is expected."""
    # A CancelledError is expected: the sequence ended before its structure was
    # compiled.
    if isinstance(error, InvalidRequestError):
        logger.info("this stage refused a sequence: %s", error)
    elif not isinstance(error, MissingTokensError | CancelledError):
        logger.error("a sequence failed in this stage", exc_info=error)
