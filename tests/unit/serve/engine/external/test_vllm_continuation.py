"""The logits processor for vLLM's runner V2, in a fake runner."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import llguidance
import numpy as np
import pytest
import torch

from multiworld.serve.engine.external.vllm import sampling_of
from multiworld.serve.engine.external.whole_engine import Run
from multiworld.serve.text.grammar import grammar_of_regex
from multiworld.serve.wire.generation_messages import Sampling
from tests.tiny_decoder import VOCABULARY, save_tokenizer
from tests.unit.serve.engine.external.test_vllm_sampling import imported_copy, letters
from tests.until import until

END = 0
SLOTS, LONGEST = 4, 64
CPU = torch.device("cpu")
PADDED = VOCABULARY + 20  # vLLM's logits may have more columns
PENALTY = 0.8


class Plugin:
    """The copied modules, and the folder of their reports."""

    def __init__(self, folder: Path) -> None:
        save_tokenizer(folder)
        facts = {"vocabulary": VOCABULARY, "end_tokens": [END]}
        (folder / "model.json").write_text(json.dumps(facts))
        self.folder = folder
        self.module: ModuleType = imported_copy(folder, "continuation")
        self.structures: ModuleType = imported_copy(folder, "structures")
        self.reports = folder / "failures"
        self.reports.mkdir()

    @property
    def failures(self) -> dict[str, str]:
        """Reports that have come since the last call: errors by name."""
        found = {each.name: each.read_text() for each in self.reports.iterdir()}
        for each in self.reports.iterdir():
            each.unlink()
        return found


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Plugin:
    return Plugin(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def plugin(opened: Plugin) -> Plugin:
    assert opened.failures == {}, "of another test"
    return opened


class Buffer:
    """vLLM's tensor with a copy on the host and one on the device."""

    def __init__(self, device: torch.device, *shape: int) -> None:
        self.gpu = torch.zeros(shape, dtype=torch.int32, device=device)
        self.np = np.zeros(shape, dtype=np.int32)

    def copy(self) -> None:
        self.gpu.copy_(torch.from_numpy(self.np))


def options(name: str, prompt: int, pattern: str = "", **more: Any) -> str:
    grammar = grammar_of_regex(pattern, "p") if pattern else ""
    given = {"name": name, "prompt": prompt, "ends": [END], "grammar": grammar}
    return json.dumps({**given, **more})


class PlayedRunner:
    """A fake runner V2 with this processor; it draws by seed, position and logits."""

    def __init__(self, plugin: Plugin, device: torch.device = CPU) -> None:
        self.states = SimpleNamespace(
            device=device,
            max_num_reqs=SLOTS,
            vocab_size=VOCABULARY,
            all_token_ids=Buffer(device, SLOTS, LONGEST),
            prompt_len=Buffer(device, SLOTS),
            prefill_len=Buffer(device, SLOTS),
            total_len=Buffer(device, SLOTS),
        )
        self.processor = plugin.module.Continuation(None, self.states)
        self.seeds: dict[int, int] = {}
        self.made: dict[int, list[int]] = {}
        self.is_needed: dict[int, bool] = {}

    def add(self, slot: int, tokens: list[int], seed: int, given: str | None) -> None:
        states, size = self.states, len(tokens)
        given_tokens = torch.tensor(tokens, dtype=torch.int32, device=states.device)
        states.all_token_ids.gpu[slot, :size] = given_tokens
        states.prompt_len.np[slot] = states.prefill_len.np[slot] = size
        states.total_len.gpu[slot] = size
        extra = None if given is None else {"multiworld": given}
        params = SimpleNamespace(extra_args=extra)
        self.is_needed[slot] = self.processor.add_request(slot, params)
        self.seeds[slot], self.made[slot] = seed, []
        states.prompt_len.copy()
        states.prefill_len.copy()

    def step(self, *slots: int) -> None:
        self.processor.apply_staged_writes()
        states, rows = self.states, []
        for slot in slots:
            total = int(states.total_len.gpu[slot])
            tokens = states.all_token_ids.gpu[slot, :total].tolist()
            draw = random.Random(f"{tokens!r}")
            row = torch.tensor([draw.gauss(0.0, 2.0) for _ in range(PADDED)])
            row[:9] += 6.0  # so that tokens repeat, and penalties decide
            row[VOCABULARY:] = -50.0
            counted = tokens[int(states.prompt_len.gpu[slot]) :]
            for token in counted:
                row[token] -= PENALTY
            rows.append(row)
        context = SimpleNamespace(idx_mapping_np=np.array(slots))
        given = torch.stack(rows).to(states.device)
        logits = self.processor.apply(given, context).cpu()
        for number, slot in enumerate(slots):
            total = int(states.total_len.gpu[slot])
            noise = torch.Generator().manual_seed(self.seeds[slot] * 1000 + total)
            gumbel = -torch.rand(PADDED, generator=noise).log().neg().log()
            token = int((logits[number] + gumbel).argmax())
            states.all_token_ids.gpu[slot, total] = token
            states.total_len.gpu[slot] += 1
            self.made[slot].append(token)


def generated(runner: PlayedRunner, slot: int, count: int) -> list[int]:
    for _ in range(count):
        runner.step(slot)
    return runner.made[slot]


def test_penalties_are_counted_from_the_true_prompt_at_every_cut(
    plugin: Plugin,
) -> None:
    prompt = [5, 6, 7]
    whole = PlayedRunner(plugin)
    whole.add(0, prompt, 3, options("whole", len(prompt)))
    tokens = generated(whole, 0, 12)
    differ = 0
    for cut in range(12):
        rest = PlayedRunner(plugin)
        rest.add(2, [*prompt, *tokens[:cut]], 3, options("rest", len(prompt)))
        assert generated(rest, 2, 12 - cut) == tokens[cut:]
        assert not rest.is_needed[2], "vLLM calls it for no row of this sequence"
        plain = PlayedRunner(plugin)
        plain.add(2, [*prompt, *tokens[:cut]], 3, None)
        differ += generated(plain, 2, 12 - cut) != tokens[cut:]
    assert differ, "vLLM alone counts from the end of what it was sent"


def test_structure_holds_ends_and_continues_at_every_cut(plugin: Plugin) -> None:
    prompt, pattern = [5, 6], "(ab|cde){2}f[a-z]{2}"
    whole = PlayedRunner(plugin)
    whole.add(1, prompt, 7, options("whole", 2, pattern))
    assert whole.is_needed[1]
    while END not in generated(whole, 1, 1):
        pass
    tokens = whole.made[1]
    text = letters(tokens[:-1], plugin.folder)
    assert text[:-3] in {f"{a}{b}" for a in ("ab", "cde") for b in ("ab", "cde")}
    for cut in range(len(tokens)):
        rest = PlayedRunner(plugin)
        rest.add(3, [*prompt, *tokens[:cut]], 7, options("rest", 2, pattern))
        rest.add(0, [9, 9, 9], 1, options("free", 3))
        for number in range(len(tokens) - cut):
            rest.step(*((0, 3) if number % 2 else (3, 0)))
        assert rest.made[3] == tokens[cut:]
    assert plugin.failures == {}


def test_structure_ends_late_if_it_can(plugin: Plugin) -> None:
    """With ``min_tokens``; what is complete ends all the same."""
    runner = PlayedRunner(plugin)
    runner.add(0, [5, 6], 7, options("open", 2, "a{1,9}", min_tokens=6))
    runner.add(1, [5, 6], 7, options("closed", 2, "ab", min_tokens=6))
    for _ in range(20):
        runner.step(0, 1)
        if END in runner.made[0] and END in runner.made[1]:
            break
    assert runner.made[0].index(END) >= 6
    assert letters(runner.made[1][: runner.made[1].index(END)], plugin.folder) == "ab"
    assert plugin.failures == {}
    grammar = grammar_of_regex("ab", "p")
    run = Run((5, 6), 2, Sampling(min_tokens=6, grammar=grammar), (END,))
    assert sampling_of(run)["min_tokens"] == 0, "vLLM would forbid the end"
    run = Run((5, 6), 2, Sampling(min_tokens=6), (END,))
    assert sampling_of(run)["min_tokens"] == 6


def test_sequence_that_vllm_preempted_continues(plugin: Plugin) -> None:
    """vLLM adds it again with its output, perhaps in a slot that others have used."""
    pattern = "[a-m]{9}"
    undisturbed = PlayedRunner(plugin)
    undisturbed.add(0, [5, 6], 7, options("one", 2, pattern))
    wanted = list(generated(undisturbed, 0, 10))
    runner = PlayedRunner(plugin)
    runner.add(0, [5, 6], 7, options("one", 2, pattern))
    first = list(generated(runner, 0, 4))
    runner.add(0, [8], 2, options("other", 1, "[x-z]{3}"))
    generated(runner, 0, 2)
    runner.add(2, [5, 6, *first], 7, options("one", 2, pattern))
    assert [*first, *generated(runner, 2, 6)] == wanted
    runner.add(0, [8], 2, None)  # not ours: nothing of the slot's past is left
    assert not runner.is_needed[0]
    assert plugin.failures == {}


def test_prefill_in_chunks_has_no_effect_on_a_structure(plugin: Plugin) -> None:
    """vLLM computes the rows of a prefill chunk but discards their tokens."""
    runner = PlayedRunner(plugin)
    runner.add(0, [5, 6, 7, 8], 7, options("one", 4, "abc"))
    runner.processor.apply_staged_writes()
    context = SimpleNamespace(idx_mapping_np=np.array([0]))
    runner.processor.apply(torch.zeros(1, PADDED), context)
    while END not in generated(runner, 0, 1):
        pass
    assert letters(runner.made[0][:-1], plugin.folder) == "abc"


BROKEN: dict[str, str] = {
    "no JSON": "{",
    "no object": "[1]",
    "empty": "{}",
    "no prompt": '{"name": "x", "ends": [0]}',
    "a prompt of nothing": '{"name": "x", "ends": [0], "prompt": 0}',
    "a prompt longer than all": '{"name": "x", "ends": [0], "prompt": 99}',
    "a prompt in words": '{"name": "x", "ends": [0], "prompt": "a"}',
    "a grammar of numbers": '{"name": "x", "ends": [0], "prompt": 1, "grammar": [5]}',
    "an unknown grammar": '{"name": "x", "ends": [0], "prompt": 1, "grammar": "("}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_sequence_ends_and_is_reported_and_others_continue(
    plugin: Plugin, name: str
) -> None:
    runner = PlayedRunner(plugin)
    runner.add(0, [5, 6], 3, options("good", 2))
    alone = PlayedRunner(plugin)
    alone.add(0, [5, 6], 3, options("good", 2))
    runner.add(1, [5, 6], 3, BROKEN[name])
    for _ in range(3):
        runner.step(1, 0)
    assert runner.made[1] == [END] * 3
    assert runner.made[0] == generated(alone, 0, 3)
    (text,) = plugin.failures.values()
    assert text.startswith(("error: ", "structured output failed"))


def test_sequence_with_a_slow_grammar_is_retried_later(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other sequences of a step wait for a grammar only briefly."""
    is_asked, matcher = threading.Event(), llguidance.LLMatcher

    def slow(*given: Any, **options: Any) -> Any:
        is_asked.wait(20.0)
        return matcher(*given, **options)

    asked = options("slow", 2, "[a-c]{30}")
    monkeypatch.setattr(llguidance, "LLMatcher", slow)
    monkeypatch.setattr(plugin.module, "ALONE_S", 0.05)
    runner = PlayedRunner(plugin)
    runner.add(0, [5, 6], 3, asked)
    runner.step(0)
    is_asked.set()
    assert runner.made[0] == [END]
    assert plugin.failures["slow"].startswith("later: ")


def test_tokens_that_a_structure_forbids_are_reported(plugin: Plugin) -> None:
    """Another release might have written such tokens."""
    runner = PlayedRunner(plugin)
    runner.add(0, [5, 6, 7], 3, options("wrong", 2, "[0-9]{3}"))
    runner.step(0)
    assert runner.made[0] == [END]
    assert plugin.failures["wrong"].startswith("structured output failed")


async def test_ended_sequences_cost_the_others_nothing(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM does not say which sequences have ended, and a paused one must continue."""
    asked: list[str] = []
    allowed = plugin.structures.Structure.allowed

    def counted(self: Any, made: list[int], prompt: int, wait_s: float) -> Any:
        asked.append("")
        return allowed(self, made, prompt, wait_s)

    runner = PlayedRunner(plugin)
    alone = PlayedRunner(plugin)
    for each in (runner, alone):
        each.add(0, [5, 6], 3, options("paused", 2, "[a-m]{20}"))
    for slot in (1, 2, 3):
        runner.add(slot, [5, slot], 3, options(f"ended{slot}", 2, "[a-z]{30}"))
    runner.step(0, 1, 2, 3)
    runner.step(0, 1, 2, 3)
    monkeypatch.setattr(plugin.structures.Structure, "allowed", counted)
    for _ in range(5):  # no structured row: the others have ended, and it pauses
        runner.add(3, [9], 1, None)
        runner.step(3)
    await until(lambda: len(asked) == 3)  # by the first of these steps, in a thread
    asked.clear()
    for _ in range(6):
        runner.step(3)
    assert not asked
    for _ in range(6):
        runner.step(0)
    assert runner.made[0] == generated(alone, 0, 8)
