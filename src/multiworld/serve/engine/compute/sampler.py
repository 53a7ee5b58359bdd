"""Sampling of the next token of each sequence of a step.

A token is a function of the logits, the parameters and the tokens so far. Other
sequences of the step do not affect it. All of its randomness is one hash of the seed,
the choice and the index of the token, so a recomputed sequence samples the same tokens.

Below, a word is a token of the vocabulary. To draw one, the words race (a form of the
Gumbel-max trick): each word has a clock, which is an exponential variate that the hash
and the word determine. The word with the smallest ratio of clock to probability wins,
so each word is drawn with exactly its probability. First the blocks of the vocabulary
race with their summed probabilities, then the words of the winning block. If logits
differ by rounding, another word wins only if two words are equally fast up to that
rounding. Drawing from the cumulative distribution would be less robust: rounding moves
the boundaries of all words, and in a flat distribution one of them easily passes the
random number.

The vocabulary is divided into blocks of 128 words. One pass finds the largest logit of
each block. This pass suffices for temperature 0, and for ``top_k`` up to 63: the
likeliest words are in the blocks with the largest maxima. Other sequences take five
passes (one to scale, three for softmax, one to sum), and one more for ``min_p`` or
``top_p``. If more than 64 words remain, up to 34 further passes find the probability of
the last of these words by bisection. A mask takes one more pass. Only the 64 likeliest
words are sorted.

If several words are as likely as the last one that ``top_k`` or ``top_p`` keeps, all of
them are kept. As in vLLM, ``min_p`` applies first, then ``top_k``, then ``top_p`` to
the remaining words.

This module imports only torch and the standard library.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad, threshold

if TYPE_CHECKING:  # the names of the parameters, and their meanings, are vLLM's
    from multiworld.serve.wire.generation_messages import Sampling as Parameters

BLOCK = 128  # number of words of the vocabulary in a block
# Number of words in a column; only the columns with the largest maxima are searched.
COLUMN = 16
FEW = 64  # number of likeliest words that ``top_k`` and ``top_p`` consider first
# Maximum bytes of logits whose probabilities are computed at once, so that they stay in
# the cache.
CHUNK_BYTES = 4 * 2**20
# Number of the first word's random clock. The clocks of blocks have the numbers from 0
# on, so that no number is used twice.
WORDS = 2**32
GREEDY_BELOW = 1e-5  # temperatures below this count as 0, as in vLLM

# Values that each byte of a mask adds to the logits of its eight words.
_BITS = torch.where(
    torch.arange(256)[:, None] >> torch.arange(8) & 1 == 1, 0.0, -math.inf
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A sampled token; log-probabilities are computed before any parameter applies."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class TokenHistory:
    """The tokens of a sequence, and how often each occurs, for the penalties."""

    def __init__(
        self,
        parameters: Parameters,
        tokens: Sequence[int],
        prompt: int,
        ends: Sequence[int] = (),
    ) -> None:
        # ``prompt`` is its number of tokens; ``ends`` are the tokens that end the
        # sequence.
        self.parameters, self.prompt, self.ends = parameters, prompt, tuple(ends)
        self.tokens = list(tokens)
        self._presence = float(parameters.presence_penalty)
        self._frequency = float(parameters.frequency_penalty)
        self._counts_words = bool(
            self._presence or self._frequency or parameters.repetition_penalty != 1.0
        )
        biased = parameters.logit_bias
        self._within = min(biased, default=0), max(biased, default=0)
        self.bias: tuple[Tensor, Tensor] | None = None
        if parameters.logit_bias:
            words = torch.tensor(list(parameters.logit_bias))
            self.bias = words, torch.tensor(list(parameters.logit_bias.values()))
        self._count()

    @property
    def index(self) -> int:
        """Index of the next output token."""
        return len(self.tokens) - self.prompt

    @property
    def words(self) -> tuple[Tensor, Tensor] | None:
        """The words that penalties apply to, and what is subtracted from each."""
        known = len(self._times)
        return (self._words[:known], self._less[:known]) if known else None

    def is_within(self, vocabulary: int) -> bool:
        """Return whether biases and penalties apply only to words of the vocabulary."""
        return self._within[0] >= 0 and self._within[1] < vocabulary

    @property
    def is_too_short(self) -> bool:
        """Whether ``min_tokens`` forbids an end token."""
        return bool(self.ends) and self.index < self.parameters.min_tokens

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self._counts_words:
            self._add(token, 1)

    def truncate(self, count: int) -> None:
        """Keep the first ``count`` tokens; the others are sampled again."""
        if count < len(self.tokens):
            del self.tokens[count:]
            self._count()

    def _count(self) -> None:
        """Count how often each word occurs in the output; 0 if only in the prompt."""
        self._places: dict[int, int] = {}
        self._times: list[int] = []
        words: list[int] = []
        if self._counts_words:
            words = list(dict.fromkeys(self.tokens))
            self._places = {token: place for place, token in enumerate(words)}
            made = Counter(self.tokens[self.prompt :])
            self._times = [made[token] for token in words]
            low, high = self._within
            self._within = min(low, *words, low), max(high, *words, high)
        size = len(words) + 64 if self._counts_words else 0
        self._words = torch.zeros(size, dtype=torch.int64)
        self._less = torch.zeros(size)
        if words:
            self._words[: len(words)] = torch.tensor(words)
            less = [
                self._presence + self._frequency * times if times else 0.0
                for times in self._times
            ]
            self._less[: len(words)] = torch.tensor(less)

    def _add(self, token: int, times: int) -> None:
        place = self._places.setdefault(token, len(self._times))
        if place == len(self._times):
            if place == len(self._words):
                self._words = torch.cat([self._words, torch.zeros_like(self._words)])
                self._less = torch.cat([self._less, torch.zeros_like(self._less)])
            self._words[place] = token
            self._times.append(0)
            low, high = self._within
            self._within = min(low, token), max(high, token)
        if times:
            self._times[place] += times
            less = self._presence + self._frequency * self._times[place]
            self._less[place] = less


def sample(
    logits: Tensor,  # [sequences, vocabulary], float32, contiguous; overwritten
    histories: Sequence[TokenHistory],  # unchanged
    masks: Sequence[Tensor | None] = (),
) -> list[Choice | ValueError]:
    """Return each sequence's next token, or a ValueError if none can be sampled."""
    # ``masks`` is empty, or has one mask per sequence. A mask has a bit for each word
    # that the sequence's structure allows, lowest bit first: [vocabulary / 8 or more],
    # uint8. None: all words are allowed.
    width = logits.shape[-1]
    foreign = [n for n, h in enumerate(histories) if not h.is_within(width)]
    if foreign:
        return _without(foreign, logits, histories, masks)
    asking = [n for n, h in enumerate(histories) if h.parameters.logprobs is not None]
    masked = {n for n, mask in enumerate(masks) if mask is not None}
    copies = {row: logits[row].clone() for row in masked.intersection(asking)}
    before = _adjust(logits, histories, masks)
    blocks = _blocks(logits)
    maxima = blocks.amax(-1)
    # NaN if any logit of the row is NaN.
    largest: list[float] = maxima.amax(-1).tolist()
    rows = [row for row, one in enumerate(largest) if math.isfinite(one)]
    tokens: dict[int, int] = {}
    asked = [(row, histories[row].parameters) for row in rows]
    greedy = [row for row, p in asked if p.temperature < GREEDY_BELOW]
    if greedy:
        tokens.update(_likeliest(blocks, maxima, greedy))
    few = [row for row, p in asked if row not in tokens and 0 < p.top_k < FEW]
    if few:
        tokens.update(_drawn_of_few(blocks, maxima, few, histories))
    many = [row for row in rows if row not in tokens]
    size = max(1, CHUNK_BYTES // max(1, 4 * width))
    for begin in range(0, len(many), size):
        tokens.update(_drawn_of_all(blocks, many[begin : begin + size], histories))
    chosen = {row: Choice(token) for row, token in tokens.items()}
    asking = [row for row in asking if row in tokens]
    if asking:
        for places, values in reversed(before):
            logits.view(-1).scatter_(0, places, values)
        for row, copy in copies.items():
            logits[row] = copy
        for begin in range(0, len(asking), size):
            part = asking[begin : begin + size]
            chosen.update(_reported(logits, part, histories, tokens))
    return [
        chosen.get(row) or ValueError(f"the largest logit is not finite: {one}")
        for row, one in enumerate(largest)
    ]


def _without(
    foreign: Sequence[int],
    logits: Tensor,
    histories: Sequence[TokenHistory],
    masks: Sequence[Tensor | None],
) -> list[Choice | ValueError]:
    """Sample for all but ``foreign`` sequences, which have words out of range."""
    others = [n for n in range(len(histories)) if n not in foreign]
    found = sample(
        logits[others],
        [histories[n] for n in others],
        [masks[n] for n in others] if masks else (),
    )
    chosen = dict(zip(others, found, strict=True))
    size = logits.shape[-1]
    error = ValueError(f"a token id is outside the vocabulary of {size} tokens")
    return [chosen.get(n, error) for n in range(len(histories))]


def _adjust(
    logits: Tensor, histories: Sequence[TokenHistory], masks: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """Apply masks, biases, penalties and ``min_tokens`` to logits."""
    # Returns the logits that were overwritten, except by masks, as indices and values,
    # in the order of the changes. Here index_select and scatter_ are 4 to 10 times as
    # fast as indexing.
    changes: list[tuple[Tensor, Tensor]] = []
    for row, mask in zip(logits, masks, strict=False):
        if mask is not None:
            row += _BITS.index_select(0, mask.to(torch.int32)).flatten()[: len(row)]
    flat, width = logits.view(-1), logits.shape[-1]
    biased = [(n * width, h.bias) for n, h in enumerate(histories) if h.bias]
    if biased:  # biases come before the penalties, as in vLLM
        places = torch.cat([at + words for at, (words, _) in biased])
        changes.append((places, found := flat.index_select(0, places)))
        found = found + torch.cat([values for _, (_, values) in biased])
        flat.index_copy_(0, places, found)
    counted = [(n, words) for n, h in enumerate(histories) if (words := h.words)]
    if counted:
        places = torch.cat([row * width + words for row, (words, _) in counted])
        asked = [histories[row].parameters.repetition_penalty for row, _ in counted]
        changes.append((places, found := flat.index_select(0, places)))
        if any(penalty != 1.0 for penalty in asked):
            penalties = torch.tensor(asked[:1])
            if len(set(asked)) > 1:
                counts = torch.tensor([len(words) for _, (words, _) in counted])
                penalties = torch.tensor(asked).repeat_interleave(counts)
            found = torch.where(found > 0, found / penalties, found * penalties)
        found = found - torch.cat([less for _, (_, less) in counted])
        flat.index_copy_(0, places, found)
    for n, history in enumerate(histories):
        if history.is_too_short:
            ends = [token for token in history.ends if token < width]
            places = n * width + torch.tensor(ends, dtype=torch.int64)
            values = flat[places]
            flat[places] = -math.inf
            if float(logits[n].amax()) == -math.inf:
                # The structure allows only end tokens, so allow them.
                flat[places] = values
            else:
                changes.append((places, values))
    return changes


def _blocks(scores: Tensor) -> Tensor:
    """Return [rows, vocabulary] as [rows, blocks, BLOCK], padded with -inf."""
    missing = -scores.shape[-1] % BLOCK
    if missing:
        scores = pad(scores, (0, missing), value=-math.inf)
    return scores.reshape(len(scores), scores.shape[-1] // BLOCK, BLOCK)


def _likeliest(blocks: Tensor, maxima: Tensor, rows: Sequence[int]) -> dict[int, int]:
    """Return the likeliest word of some rows; the first one on a tie."""
    block = maxima[rows].argmax(-1)
    word = blocks[rows, block].argmax(-1)
    return dict(zip(rows, (block * BLOCK + word).tolist(), strict=True))


def _largest(blocks: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """Return the FEW largest values of each row, descending, and their words."""
    which = maxima.topk(min(FEW, maxima.shape[-1]), sorted=False).indices
    at = which + torch.arange(len(blocks))[:, None] * blocks.shape[1]
    largest = blocks.reshape(-1, BLOCK).index_select(0, at.flatten())
    # The FEW largest values of a row are in the FEW columns with the largest maxima.
    columns = largest.view(len(blocks), COLUMN, -1)
    width = columns.shape[2]
    first = columns.amax(1).topk(min(FEW, width), sorted=False).indices
    columns = columns.gather(2, first[:, None].expand(-1, COLUMN, -1))
    values, found = columns.flatten(1).topk(FEW)
    place = found // first.shape[1] * width
    place += first.gather(1, found % first.shape[1])
    return values, which.gather(1, place // BLOCK) * BLOCK + place % BLOCK


def _drawn_of_few(
    blocks: Tensor,
    maxima: Tensor,
    rows: Sequence[int],
    histories: Sequence[TokenHistory],
) -> dict[int, int]:
    """Draw words for rows with ``top_k`` < FEW; leave out rows with too many ties."""
    found, words = _largest(_some(blocks, rows), _some(maxima, rows))
    parameters = [histories[i].parameters for i in rows]
    last = found.gather(1, _column([p.top_k - 1 for p in parameters], torch.int64))
    temperature = _column([p.temperature for p in parameters])
    likely = (found.double() / temperature).softmax(-1)
    likely *= (found >= last) & (
        likely >= _column([p.min_p for p in parameters]) * likely[:, :1]
    )
    # A word remains if the likelier words sum to less than ``top_p``. The likeliest
    # word always remains.
    sums = likely.cumsum(-1)
    top_p = _column([p.top_p for p in parameters])
    kept = (sums - likely < top_p * sums[:, -1:]) & (likely > 0)
    kept[:, 0] = True
    min_probability = found.gather(1, kept.sum(-1, keepdim=True) - 1)
    likely *= found >= min_probability
    chosen = _drawn_by_word(likely, words, _hashes([histories[i] for i in rows]))
    has_more = (found[:, -1:] == last)[:, 0].tolist()
    triples = zip(rows, chosen, has_more, strict=True)
    # A row is left out if its FEWth word is as likely as the last word that ``top_k``
    # keeps, because further words may be, too.
    return {i: token for i, token, more in triples if not more}


def _drawn_of_all(
    blocks: Tensor, rows: Sequence[int], histories: Sequence[TokenHistory]
) -> dict[int, int]:
    """Draw words for rows that need the whole vocabulary, not just FEW words."""
    parameters = [histories[i].parameters for i in rows]
    temperature = torch.tensor([p.temperature for p in parameters])[:, None]
    # softmax gives a row the same bits at every position; exp would not.
    likely = (_some(blocks, rows).flatten(1) / temperature).softmax(-1)
    parts = likely.view(len(rows), -1, BLOCK)
    sums = parts.sum(-1).double()
    hashes = _hashes([histories[i] for i in rows])
    cut = [n for n, p in enumerate(parameters) if _is_cut(p, blocks)]
    tokens: dict[int, int] = {}
    if cut:
        whole = sums[cut].cumsum(-1)[:, -1:]
        given = [parameters[n] for n in cut]
        drawn = _drawn_of_likeliest(_some(parts, cut), whole, given, hashes[cut])
        pairs = zip(cut, drawn, strict=True)
        tokens = {rows[n]: token for n, token in pairs if token is not None}
    for n in cut:
        if rows[n] not in tokens:
            min_probability = _threshold(likely[n], parameters[n])
            threshold(likely[n], _below(min_probability), 0.0, inplace=True)
            sums[n] = parts[n].sum(-1).double()
    left = [n for n, row in enumerate(rows) if row not in tokens]
    if left:
        words = _drawn_by_block(_some(parts, left), sums[left], hashes[left])
        tokens.update(zip((rows[n] for n in left), words, strict=True))
    return tokens


def _is_cut(parameters: Parameters, blocks: Tensor) -> bool:
    has_k = 0 < parameters.top_k < blocks.shape[1] * BLOCK
    return has_k or parameters.min_p > 0 or parameters.top_p < 1


def _drawn_of_likeliest(
    parts: Tensor, whole: Tensor, parameters: Sequence[Parameters], hashes: Tensor
) -> list[int | None]:
    """Draw words for rows in which at most FEW words remain; None for others."""
    # ``parts`` are probabilities, [rows, blocks, BLOCK]; ``whole`` are their sums,
    # [rows, 1].
    found, words = _largest(parts, parts.amax(-1))
    likely = found.double()
    min_p = _column([p.min_p for p in parameters])
    min_probability = min_p * likely[:, :1]
    sums = (likely * (likely >= min_probability)).cumsum(-1)
    is_min_known = likely[:, -1:] < min_probability
    whole = torch.where(is_min_known, sums[:, -1:], whole)
    goal = _column([p.top_p for p in parameters]) * whole
    last = torch.searchsorted(sums, goal)
    bound = likely.gather(1, last.clamp(max=FEW - 1))
    is_known = (
        (is_min_known | (min_p == 0))
        & (last < FEW)
        & (likely[:, -1:] < bound)  # so that no word outside ``found`` is as likely
        & (_column([p.top_k for p in parameters], torch.int64) == 0)
    )
    chosen = _drawn_by_word(likely * (likely >= bound), words, hashes)
    # A row gets None if words outside ``found`` may remain, or if it has a ``top_k``.
    pairs = zip(chosen, is_known[:, 0].tolist(), strict=True)
    return [word if is_sure else None for word, is_sure in pairs]


def _drawn_by_block(parts: Tensor, sums: Tensor, hashes: Tensor) -> list[int]:
    """Draw words by their probabilities; ``sums``: probabilities of the blocks."""
    block = (sums / clocks(hashes, torch.arange(sums.shape[1])[None])).argmax(-1)
    words = block[:, None] * BLOCK + torch.arange(BLOCK)
    inside = parts[torch.arange(len(parts)), block].double()
    word = (inside / clocks(hashes, words + WORDS)).argmax(-1)
    found: list[int] = (block * BLOCK + word).tolist()
    return found


def _drawn_by_word(likely: Tensor, words: Tensor, hashes: Tensor) -> list[int]:
    """Draw one of a few words for each row, as ``_drawn_by_block`` would."""
    # ``likely`` are probabilities, float64, [rows, words]; ``words`` are the words'
    # numbers in the vocabulary.
    blocks = words // BLOCK
    sums = likely.new_zeros(len(words), int(blocks.amax()) + 1)
    sums.scatter_add_(1, blocks, likely)
    sums = sums.gather(1, blocks)
    first = (sums / clocks(hashes, blocks)).argmax(-1, keepdim=True)
    inside = likely * (blocks == blocks.gather(1, first))
    drawn = (inside / clocks(hashes, words + WORDS)).argmax(-1, keepdim=True)
    found: list[int] = words.gather(1, drawn)[:, 0].tolist()
    return found


def _threshold(likely: Tensor, parameters: Parameters) -> float:
    """Return the probability of the least likely word that remains; 0: all remain."""
    # ``likely`` is [vocabulary, padded to whole blocks], float32.
    min_probability = 0.0
    top_k, top_p = parameters.top_k, parameters.top_p
    maxima = likely.view(-1, BLOCK).amax(-1)
    if parameters.min_p > 0:
        min_probability = parameters.min_p * float(maxima.amax())
    if 0 < top_k < len(likely):
        kth = torch.kthvalue(likely, len(likely) - top_k + 1).values
        min_probability = max(min_probability, float(kth))
    if top_p < 1:
        min_probability = max(
            min_probability, _nucleus(likely, maxima, min_probability, top_p)
        )
    return min_probability


def _nucleus(
    likely: Tensor, maxima: Tensor, min_probability: float, top_p: float
) -> float:
    """Return the largest threshold at which the remaining words reach ``top_p``."""
    # ``top_p`` is reached if the words at or above the threshold have this share of the
    # probability of all words at or above ``min_probability``.
    whole = _mass(likely, min_probability)
    goal = top_p * whole
    found, _ = _largest(likely.view(1, -1, BLOCK), maxima[None])
    sums = found[0].double().cumsum(0)
    if float(sums[-1]) >= goal:
        return float(found[0, int(torch.searchsorted(sums, goal))])
    # All words less likely than ``small`` together have less than ``whole - goal``, so
    # the threshold is not below ``small``.
    small = 0.99 * (whole - goal) / len(likely)
    low, high = _bits(max(min_probability, small)), _bits(float(found[0, -1])) + 1
    below, above = _mass(likely, _float(low)), float(sums[-1])
    # Stop if at most one word lies between ``low`` and ``high``: any threshold there
    # then keeps the same words.
    while high - low > 1 and below - above > 1.5 * _float(low):
        middle = (low + high) // 2
        mass = _mass(likely, _float(middle))
        if mass >= goal:
            low, below = middle, mass
        else:
            high, above = middle, mass
    return _float(low)


def _mass(likely: Tensor, min_probability: float) -> float:
    """Return the sum of all probabilities at or above ``min_probability``."""
    if min_probability > 0:
        likely = threshold(likely, _below(min_probability), 0.0)
    # Sum by blocks: torch divides a sum of more than 32,768 numbers between its
    # threads, and the result would depend on the number of threads.
    return float(likely.view(-1, BLOCK).sum(-1).double().sum())


def _bits(value: float) -> int:
    """Return the bits of a positive float32, which are ordered like the values."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])


def _below(value: float) -> float:
    """Return the largest float32 below a positive one; 0 below the smallest."""
    return _float(max(0, _bits(value) - 1))


def _column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


def _reported(
    logits: Tensor,
    rows: Sequence[int],
    histories: Sequence[TokenHistory],
    tokens: Mapping[int, int],
) -> dict[int, Choice]:
    logprobs = _some(logits, rows).log_softmax(-1)
    blocks = _blocks(logprobs)
    values, words = _largest(blocks, blocks.amax(-1))
    own = logprobs.gather(1, _column([tokens[row] for row in rows], torch.int64))
    found = {}
    for place, (row, logprob) in enumerate(zip(rows, own[:, 0].tolist(), strict=True)):
        count = min(histories[row].parameters.logprobs or 0, logits.shape[-1])
        likeliest = words[place, :count].tolist(), values[place, :count].tolist()
        found[row] = Choice(tokens[row], logprob, tuple(zip(*likeliest, strict=True)))
    return found


def _some(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows of a tensor, a view if they are consecutive."""
    begin, end = rows[0], rows[0] + len(rows)
    return tensor[begin:end] if rows[-1] == end - 1 else tensor[rows]


def _hashes(histories: Sequence[TokenHistory]) -> Tensor:
    """Return the hash of each sequence's next token, int64, [sequences, 1]."""
    found = [
        hash_of(h.parameters.seed, h.parameters.choice, h.index) for h in histories
    ]
    return torch.tensor(found)[:, None]


def hash_of(seed: int, choice: int, index: int) -> int:
    """Return the hash of one token: BLAKE2b (RFC 7693), 64 bits, signed."""
    data = struct.pack("<QQQ", seed % 2**64, choice, index)
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def clocks(hashes: Tensor, numbers: Tensor) -> Tensor:
    """Return exponential variates with mean 1, float64, [rows, numbers]."""
    # ``hashes`` are [rows, 1], int64; ``numbers`` are [rows or 1, numbers], int64, 0 or
    # more. This is SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014).
    mixed = hashes + (numbers + 1) * _GAMMA
    mixed = (mixed ^ _shifted(mixed, 30)) * _MIX_1
    mixed = (mixed ^ _shifted(mixed, 27)) * _MIX_2
    mixed = mixed ^ _shifted(mixed, 31)
    # Numbers in (0, 1): 52 random bits, plus half of the last bit, so that none is 0.
    uniform = (_shifted(mixed, 12).double() + 0.5) * 2.0**-52
    return uniform.log().neg()


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift int64 values to the right as if they were unsigned."""
    found: Tensor = (values >> bits) & (2 ** (64 - bits) - 1)
    return found


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
"""Constants of SplitMix64."""


def finish_of(
    token: int, count: int, parameters: Parameters, ends: Sequence[int]
) -> Literal["", "stop", "length"]:
    """Return ``stop`` or ``length`` if a token ends the sequence; otherwise empty."""
    if token in ends:
        return "stop"
    return "length" if count >= parameters.max_tokens else ""
