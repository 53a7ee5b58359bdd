"""Measurement of the stages of a model that generates text."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from multiworld.errors import ModelFailedError
from multiworld.serve.engine.compute.stage_engine import (
    Chores,
    Computed,
    StageEngine,
    engine_of,
)
from multiworld.serve.engine.compute.transfers import Transfers
from multiworld.serve.engine.models.meter import Measured, parameter_bytes, timed
from multiworld.serve.spec.stage import Generation, Model, StageContext
from multiworld.serve.wire.generation_messages import (
    Sampling,
    SequenceStart,
    StepPart,
)
from multiworld.serve.wire.protocol import Key

GREEDY = Sampling(temperature=0.0, ignore_eos=True)


class TextMeter:
    """Measures a prefill of ``context`` tokens, and steps with one row per sequence."""

    def __init__(
        self,
        model: Model,
        batches: list[int],
        context: int,
        repeats: int,
        device: str = "cpu",
        *,
        is_deterministic: bool = False,
    ) -> None:
        assert model.generation is not None
        self._facts: Generation = model.generation
        self._model, self._batches, self._repeats = model, batches, repeats
        self._device, self._is_deterministic = device, is_deterministic
        self.context = min(context, self._facts.max_tokens - 1)
        chance = torch.Generator().manual_seed(0)
        shape = (self.context,)
        self._rows = torch.randint(self._facts.vocabulary, shape, generator=chance)
        self._number, self._weight_bytes = 0, 0
        self._engine: StageEngine | None = None

    def load(self, number: int) -> None:
        self._number = number
        with torch.inference_mode():
            stage = self._model.stages[number]
            function = stage.load(StageContext(device=self._device))
        self._weight_bytes = parameter_bytes(function)
        self._engine = engine_of(
            function,  # type: ignore[arg-type]  # text stages have another signature
            is_last=number == len(self._model.stages) - 1,
            model=self._facts,
            is_deterministic=self._is_deterministic,
            transfers=Transfers(torch.device(self._device)),
        )

    def measure(self) -> Measured:
        engine, self._engine = self._engine, None
        assert engine is not None
        self._begin(engine, max(self._batches))
        seconds, prompt_rows = {}, self._rows
        prompt = [StepPart(_key(0), 0, self.context, samples=True)]
        run = functools.partial(_computed, engine, prompt, prompt_rows)
        seconds[self.context], found = timed(run, self._repeats)
        layers = engine.cache.copied(_key(0)[:2], 0, self.context)
        for text in range(1, max(self._batches)):
            engine.cache.restore(_key(text)[:2], [layers], self.context)
        for count in self._batches:
            step = [
                StepPart(_key(k), self.context, 1, samples=True) for k in range(count)
            ]
            rows = prompt_rows[torch.arange(count) % self.context]
            run = functools.partial(_computed, engine, step, rows)
            seconds[count], _ = timed(run, self._repeats)
        out_bytes = 0.0
        if found.hidden is not None:
            self._rows = found.hidden
            out_bytes = found.hidden.nbytes / self.context
        return Measured(
            name=self._model.stages[self._number].name or str(self._number),
            seconds=dict(sorted(seconds.items())),
            weight_bytes=self._weight_bytes,
            out_bytes=out_bytes,
            kv_bytes=self._facts.kv_bytes[self._number],
            kv_peak_bytes=engine.cache.nbytes,
        )

    def _begin(self, engine: StageEngine, texts: int) -> None:
        """Start the sequences; their token values do not affect timing."""
        tokens = (0,) * self.context
        starts = [
            (SequenceStart(_key(k), tokens, self.context, (), GREEDY), None)
            for k in range(texts)
        ]
        engine.tidy(Chores(open=starts))


def _key(text: int) -> Key:
    return "meter", text, 0


def _computed(engine: StageEngine, step: list[StepPart], rows: Tensor) -> Computed:
    found = engine.compute(step, rows)
    if found.failed:
        raise ModelFailedError("a stage failed while it was measured") from (
            found.failed[0][1]
        )
    return found
