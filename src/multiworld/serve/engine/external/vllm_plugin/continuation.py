"""Exact continuation of sequences in vLLM's runner V2, which samples by itself.

V2 draws each token with a hash of the seed, the position and the token's id. So a
sequence that is sent again, with the output tokens so far appended to its prompt,
continues exactly if two things are corrected. First, the length of the prompt is set to
the true one, as V2 itself does after a preemption: its kernels count penalties and bad
words from there. Second, tokens that a structure forbids are masked, by a matcher that
has consumed the output tokens so far.

The host computes the masks. At the start of a step, copies of the last tokens of
sequences with a structure are enqueued on the device, behind the previous step. A
thread waits for these copies, and computes the masks while the model computes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .structures import (
    ALONE_S,
    SHARED_S,
    Failure,
    Ranks,
    Structure,
    Structures,
    end_of,
    report,
)

if TYPE_CHECKING:

    class LogitsProcessor:
        """vLLM's class."""
else:
    try:
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
    except ImportError:
        LogitsProcessor = object

# Maximum seconds to wait for a step's masks, including the compilation of grammars.
MASKS_S = 10.0

# Copies from the device: lengths and last tokens; output tokens of fresh sequences, by
# slot; and the event after which the copies are complete (None: already complete).
Copies = tuple[torch.Tensor, dict[int, torch.Tensor], Any]


class Sequence:
    """A sequence whose next tokens are masked."""

    def __init__(
        self, name: str, ends: Any, structure: Structure | None, least: int = 0
    ) -> None:
        self.name, self.ends, self.structure = name, ends, structure
        self.least = least  # minimum number of output tokens, if the grammar allows it
        self.prompt = 0  # number of tokens of the prompt
        # True until its output tokens so far are copied from the device.
        self.is_fresh = True
        self.made: list[int] = []
        self.total = 0  # number of tokens after its last step
        self.has_failed = structure is None
        self.step = 0  # last step in which it was masked

    def fail(self, error: Exception) -> None:
        """Report an error once; from then on, only an end token is allowed."""
        if not self.has_failed:
            self.has_failed = True
            report(self.name, error)

    def advance(self, total: int, last: int, made: list[int] | None) -> None:
        """Append the last step's token, if it sampled one; ``made``: all output."""
        if made is not None:
            self.made = made
        elif total == self.total + 1:
            self.made.append(last)
        elif total != self.total:
            more = total - self.total
            raise Failure(f"a step changed the number of tokens by {more}, not 0 or 1")
        self.total = total

    def mask(self, vocabulary: int, wait_s: float) -> torch.Tensor:
        """Return a mask of the tokens that may be next: one bit each, uint8."""
        if not self.has_failed:
            assert self.structure is not None
            try:
                found = self.structure.allowed(self.made, 0, wait_s)
                return self._without_ends(found)
            except Exception as error:
                self.fail(error)
        end = end_of(self.ends, vocabulary)
        found = torch.zeros(-(-vocabulary // 8), dtype=torch.uint8)
        found[end // 8] = 1 << end % 8
        return found

    def _without_ends(self, allowed: torch.Tensor) -> torch.Tensor:
        """Forbid ends before ``least`` tokens, unless nothing else is allowed."""
        if len(self.made) >= self.least:
            return allowed
        found = allowed.clone()
        for end in self.ends:
            if end // 8 < len(found):
                found[end // 8] &= 255 ^ (1 << end % 8)
        return found if bool(found.any()) else allowed


class Continuation(LogitsProcessor):
    """A logits processor that sets true prompt lengths and masks forbidden tokens."""

    def __init__(
        self,
        vllm_config: Any,
        req_states: Any,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._states, self._device = req_states, req_states.device
        self._vocabulary: int = req_states.vocab_size
        self._sequences: dict[int, Sequence] = {}  # by slot
        self._is_masked = np.zeros(req_states.max_num_reqs, dtype=bool)
        self._structures, self._ranks = Structures(), Ranks()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="multiworld masks")
        self._masks: Future[dict[int, torch.Tensor]] | None = None
        self._step = 0
        self._slots: tuple[list[int], torch.Tensor] = [], torch.empty(0)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Start a sequence, or continue one after a preemption."""
        self._sequences.pop(req_idx, None)
        options = (sampling_params.extra_args or {}).get("multiworld")
        sequence = None
        if options is not None:
            sequence = self._begun(req_idx, options)
        if sequence is not None:
            self._sequences[req_idx] = sequence
        self._is_masked[req_idx] = sequence is not None
        return sequence is not None

    def _begun(self, slot: int, options: str) -> Sequence | None:
        name, ends, states = "", [], self._states
        try:
            given = json.loads(options)
            name, ends, prompt = given["name"], given["ends"], given["prompt"]
            maximum = states.prefill_len.np[slot]
            if not 1 <= prompt <= maximum:
                raise ValueError(
                    f"prompt length is {prompt}; it must be from 1 to {maximum}"
                )
            # vLLM copies this number to the device later, before the step.
            states.prompt_len.np[slot] = prompt
            grammar = given.get("grammar")
            if not grammar:
                return None
            least = given.get("min_tokens", 0)
            found = Sequence(name, ends, self._structures.begin(grammar), least)
            found.prompt = prompt
            return found
        except Exception as error:
            report(name, error)
            return Sequence(name, ends, None)

    # At the start of a step.

    def apply_staged_writes(self) -> None:
        """Start to compute the masks of a step."""
        self._masks = None
        self._step += 1
        # vLLM does not report which sequences have ended, so consider only those that
        # may have a new token: fresh ones, and those in the last step.
        sequences = {
            slot: sequence
            for slot, sequence in self._sequences.items()
            if sequence.is_fresh or sequence.step >= self._step - 1
        }
        if not sequences or not self._ranks.is_first:
            return
        try:
            copies = self._copies(sequences)
            self._masks = self._pool.submit(self._computed, sequences, copies)
        except Exception as error:
            for sequence in sequences.values():
                sequence.fail(error)

    def _copies(self, sequences: dict[int, Sequence]) -> Copies:
        """Copy lengths and last tokens of sequences, and all output of fresh ones."""
        states, slots = self._states, list(sequences)
        if slots != self._slots[0]:
            self._slots = slots, self._to_device(torch.tensor(slots))
        at = self._slots[1]
        totals = states.total_len.gpu[at].long()
        lasts = states.all_token_ids.gpu[at, (totals - 1).clamp(min=0)]
        known = self._to_host(torch.stack([totals, lasts.long()]))
        fresh: dict[int, torch.Tensor] = {}
        for slot, sequence in sequences.items():
            if sequence.is_fresh:
                end = int(states.prefill_len.np[slot])
                made = states.all_token_ids.gpu[slot, sequence.prompt : end]
                fresh[slot] = self._to_host(made)
                sequence.is_fresh = False
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return known, fresh, done

    def _to_host(self, given: torch.Tensor) -> torch.Tensor:
        if self._device.type != "cuda":
            return given.clone()
        host = torch.empty(given.shape, dtype=given.dtype, pin_memory=True)
        return host.copy_(given, non_blocking=True)

    def _to_device(self, given: torch.Tensor) -> torch.Tensor:
        if self._device.type != "cuda":
            return given.to(self._device)
        return given.pin_memory().to(self._device, non_blocking=True)

    def _computed(
        self, sequences: dict[int, Sequence], copies: Copies
    ) -> dict[int, torch.Tensor]:
        """Return the mask of each sequence, by slot. Runs in a thread."""
        known, fresh, done = copies
        if done is not None:
            done.synchronize()
        ready = (
            s.structure is None or s.structure.is_ready for s in sequences.values()
        )
        until = self._clock() + (SHARED_S if any(ready) else ALONE_S)
        totals, lasts = known.tolist()
        masks: dict[int, torch.Tensor] = {}
        for number, (slot, sequence) in enumerate(sequences.items()):
            made = fresh[slot].tolist() if slot in fresh else None
            try:
                sequence.advance(totals[number], lasts[number], made)
            except Exception as error:
                sequence.fail(error)
            wait_s = max(0.0, until - self._clock())
            masks[slot] = sequence.mask(self._vocabulary, wait_s)
        return masks

    # Once the logits of a step are computed.

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Mask the tokens that structures forbid, in place."""
        rows = np.flatnonzero(self._is_masked[ctx.idx_mapping_np])
        if not len(rows):
            return logits
        try:
            packed = self._packed(ctx.idx_mapping_np[rows].tolist())
        except Exception as error:
            packed = self._ends(ctx.idx_mapping_np[rows].tolist(), error)
        packed = self._ranks.broadcast(self._to_device(packed))
        bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
        allowed = (packed[:, :, None] >> bits & 1).flatten(1).bool()
        width = logits.shape[1]
        # vLLM may pad the vocabulary, so that the logits have more columns.
        if allowed.shape[1] < width:
            missing = width - allowed.shape[1]
            allowed = torch.nn.functional.pad(allowed, (0, missing))
        at = self._to_device(torch.from_numpy(rows))
        kept = logits[at].masked_fill(~allowed[:, :width], -math.inf)
        logits[at] = kept
        return logits

    def _packed(self, slots: list[int]) -> torch.Tensor:
        """Return the masks of slots, [slots, bytes]; only the first rank's are used."""
        size = -(-self._vocabulary // 8)
        found = torch.zeros((len(slots), size), dtype=torch.uint8)
        if not self._ranks.is_first:
            return found
        masks = {} if self._masks is None else self._masks.result(MASKS_S)
        for row, slot in enumerate(slots):
            sequence = self._sequences[slot]
            sequence.step = self._step
            # A sequence that skipped the last step has no mask yet, and no new token:
            # compute its mask now.
            mask = masks.get(slot)
            if mask is None:
                mask = sequence.mask(self._vocabulary, ALONE_S)
            mask = mask[:size]
            found[row, : len(mask)] = mask
        return found

    def _ends(self, slots: list[int], error: Exception) -> torch.Tensor:
        for slot in slots:
            self._sequences[slot].fail(error)
        ends = [self._sequences[slot].mask(self._vocabulary, 0.0) for slot in slots]
        return torch.stack(ends)
