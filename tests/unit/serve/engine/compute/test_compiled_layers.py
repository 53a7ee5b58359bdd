"""Compiled layers of decoders: transformers' results, in any step."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from multiworld.serve.engine.compute import compiled_layers
from multiworld.serve.engine.compute.batch_invariant_attention import (
    PIECE,
    InvariantAttention,
)
from multiworld.serve.engine.compute.batch_invariant_layers import (
    make_elements_invariant,
    make_linears_invariant,
)
from multiworld.serve.engine.compute.compiled_attention import compiled
from multiworld.serve.engine.compute.compiled_layers import (
    CompiledLayer,
    compile_layers,
)
from multiworld.serve.engine.compute.kv_cache import KvCache, Rows, StepAttention
from multiworld.serve.engine.compute.layer_code import DTYPES, can_run, library
from multiworld.serve.engine.compute.stage_engine import engine_of
from multiworld.serve.engine.models import decoder, decoder_stage
from multiworld.serve.engine.models.packed_linear import pack_linears
from multiworld.serve.engine.models.partition import Span
from multiworld.serve.spec.stage import StageContext
from tests.tiny_decoder import VOCABULARY, save_decoder

pytestmark = pytest.mark.skipif(not can_run(), reason="not compiled here")

LAYERS, TOKENS = 4, 140


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def loaded(
    folder: Path,
    quantization: str | None = None,
    dtype: str = "float32",
    *,
    is_invariant: bool = False,
) -> Any:
    stage = decoder_stage.load(
        folder, Span(0, LAYERS, LAYERS), dtype, "cpu", quantization
    )
    with torch.inference_mode():
        for weight in stage.parameters():
            if weight.dim() == 1:  # of norms, which are all 1 at first
                weight.add_(torch.randn(weight.shape), alpha=0.2)
        pack_linears(stage)
        if is_invariant:
            make_linears_invariant(stage)
            make_elements_invariant(stage)
    return stage


@torch.inference_mode()
def logits(
    stage: Any, tokens: Tensor, counts: list[int], otherwise: Any = StepAttention
) -> Tensor:
    attention = compiled(otherwise)
    cache, found, begin = KvCache(attention=attention, granule=PIECE), [], 0
    for count in counts:
        at = torch.arange(begin, begin + count)
        step = cache.step([Rows("a", begin, count)])
        found.append(stage(tokens[at], at, step, torch.arange(count)))
        begin += count
    return torch.cat(found)


def drawn() -> Tensor:
    return torch.randint(
        VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(2)
    )


@pytest.mark.parametrize(
    ("quantization", "dtype", "limit"),
    [
        (None, "float32", 1e-5),
        ("int8", "float32", 1e-3),
        (None, "bfloat16", 5e-2),
        ("int8", "bfloat16", 5e-2),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_results_are_those_of_transformers(
    family: str, quantization: str | None, dtype: str, limit: float, tmp_path: Path
) -> None:
    """Qwen3 normalizes heads, and Mistral has windows."""
    folder, tokens = save_decoder(tmp_path, family), drawn()
    stage = loaded(folder, quantization, dtype)
    counts = [TOKENS - 3, 1, 1, 1]
    wanted = logits(stage, tokens, counts)
    assert compile_layers(stage) == LAYERS
    found = logits(stage, tokens, counts)
    assert not torch.equal(found, wanted)  # the code is used
    assert (found - wanted).norm() < limit * wanted.norm()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_transformers(
    family: str, tmp_path: Path
) -> None:
    """Compiled layers round once, where transformers rounds up to three times."""
    folder, tokens = save_decoder(tmp_path, family), drawn()
    stage = loaded(folder, dtype="bfloat16")
    wide = decoder_stage.load(folder, Span(0, LAYERS, LAYERS), "float32", "cpu", None)
    with torch.no_grad():
        kept = dict(stage.named_parameters())
        for name, weight in wide.named_parameters():
            weight.copy_(kept[name] if kept[name].numel() else weight.bfloat16())
    exact = logits(wide, tokens, [TOKENS])
    theirs = logits(stage, tokens, [TOKENS]) - exact
    assert compile_layers(stage) == LAYERS
    ours = logits(stage, tokens, [TOKENS]) - exact
    assert ours.norm() < 1.1 * theirs.norm()


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt2", "gpt_neox", "mixtral"])
def test_other_layers_stay_as_they_are(family: str, tmp_path: Path) -> None:
    stage, tokens = loaded(save_decoder(tmp_path, family)), drawn()
    wanted = logits(stage, tokens, [TOKENS])
    assert compile_layers(stage) == 0
    assert torch.equal(logits(stage, tokens, [TOKENS]), wanted)


def _other_activation(layer: Any) -> None:
    layer.mlp.act_fn = torch.nn.GELU()


def _other_residual(layer: Any) -> None:
    function = layer.forward
    layer.forward = lambda *args, **kwargs: function(*args, **kwargs) * 0.9


def _no_rotation(layer: Any) -> None:
    function = layer.self_attn.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        cosines, sines = kwargs["position_embeddings"]
        still = torch.ones_like(cosines), torch.zeros_like(sines)
        return function(*args, **{**kwargs, "position_embeddings": still})

    layer.self_attn.forward = forward


def _scaled_far_away(layer: Any) -> None:
    """As in Ministral 3, whose queries are scaled from a position on."""
    function = layer.self_attn.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        far = 1.0 + 0.5 * (kwargs["position_ids"] > TOKENS - 10)[..., None]
        given = kwargs["hidden_states"]
        return function(*args, **{**kwargs, "hidden_states": given * far.to(given)})

    layer.self_attn.forward = forward


def _scaled_norm(layer: Any) -> None:
    function = layer.input_layernorm.forward
    layer.input_layernorm.forward = lambda given: function(given) * 1.1


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 5e-2)])
@pytest.mark.parametrize(
    "change",
    [
        _other_activation,
        _other_residual,
        _no_rotation,
        _scaled_far_away,
        _scaled_norm,
    ],
)
def test_layer_that_computes_otherwise_stays(
    change: Any, dtype: str, limit: float, tmp_path: Path
) -> None:
    """It has the same parts; only a trial run reveals the difference."""
    stage = loaded(save_decoder(tmp_path, "llama"), dtype=dtype)
    layer = stage.whole.model.layers[1]
    change(layer)
    tokens = drawn()
    wanted = logits(stage, tokens, [TOKENS])
    assert compile_layers(stage) == LAYERS - 1
    assert not isinstance(layer.forward, CompiledLayer)
    found = logits(stage, tokens, [TOKENS])
    assert (found - wanted).norm() < limit * wanted.norm()


@pytest.mark.parametrize("counts", [[TOKENS], [100, 40]])
def test_trial_leaves_rotations_as_they_were(counts: list[int], tmp_path: Path) -> None:
    """Dynamic rotations keep the frequencies of the longest position they have seen."""
    folder = save_decoder(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 64
    config["rope_parameters"] = {
        **{"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
        "original_max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    plain = loaded(folder)
    torch.manual_seed(1)
    stage = loaded(folder)
    assert compile_layers(stage) == LAYERS
    tokens = drawn()
    wanted, found = (logits(each, tokens, counts) for each in (plain, stage))
    assert (found - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_additions_are_compared(dtype: str, tmp_path: Path) -> None:
    """The trial compares what a layer adds, not the residual stream."""
    stage = loaded(save_decoder(tmp_path, "llama"), dtype=dtype)
    layers = stage.whole.model.layers
    stage.whole.model.embed_tokens.weight.data *= 1e5 if dtype == "float32" else 50
    layers[2].mlp.act_fn = torch.nn.GELU()
    assert compile_layers(stage) == LAYERS - 1


def test_layer_with_gates_beside_its_queries_stays(tmp_path: Path) -> None:
    """Its queries are twice as wide, so a trial would raise."""
    stage = loaded(save_decoder(tmp_path, "llama"))
    attention = stage.whole.model.layers[0].self_attn
    attention.q_proj = torch.nn.Linear(64, 128, bias=False)

    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        states = [attention.q_proj(hidden_states)[..., :64]]
        states += [attention.k_proj(hidden_states), attention.v_proj(hidden_states)]
        query, key, value = (
            each[0].view(each.shape[1], -1, 16).transpose(0, 1) for each in states
        )
        found = stage.attend(0, query, key, value)
        return attention.o_proj(found.flatten(1))[None], None

    attention.forward = forward
    assert compile_layers(stage) == LAYERS - 1


def test_norms_of_another_dtype_stay_as_they_are(tmp_path: Path) -> None:
    """Some models keep their norms in float32."""
    stage = loaded(save_decoder(tmp_path, "llama"), dtype="bfloat16")
    layer = stage.whole.model.layers[2]
    layer.input_layernorm.weight.data = layer.input_layernorm.weight.data.float()
    function = layer.input_layernorm.forward
    layer.input_layernorm.forward = lambda given: function(given).bfloat16()
    assert compile_layers(stage) == LAYERS - 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_engines_compile_layers(
    is_deterministic: bool, dtype: str, tmp_path: Path
) -> None:
    folder = save_decoder(tmp_path, "llama")
    model = decoder.model(str(folder), dtype=dtype)
    assert model.generation is not None
    function: Any = model.stages[0].load(StageContext())
    engine_of(
        function,
        is_last=True,
        model=model.generation,
        is_deterministic=is_deterministic,
    )
    for layer in function.whole.model.layers:
        assert isinstance(layer.forward, CompiledLayer)


def test_nothing_is_replaced_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = loaded(save_decoder(tmp_path, "llama"))
    monkeypatch.setattr(compiled_layers, "can_run", lambda: False)
    assert compile_layers(stage) == 0


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [(None, "float32"), ("int8", "float32"), (None, "bfloat16")],
)
def test_row_has_the_same_bits_in_every_step(
    quantization: str | None, dtype: str, threads: int, tmp_path: Path
) -> None:
    folder = save_decoder(tmp_path, "qwen3")
    stage, tokens = loaded(folder, quantization, dtype, is_invariant=True), drawn()
    assert compile_layers(stage) == LAYERS
    whole = logits(stage, tokens, [TOKENS], InvariantAttention)
    for counts in ([1] * 5 + [TOKENS - 5], [77, 1, 1, 61]):
        found = logits(stage, tokens, counts, InvariantAttention)
        assert torch.equal(found, whole)


def test_given_states_are_not_changed(tmp_path: Path) -> None:
    """A step that fails is computed again from the same states."""
    folder = save_decoder(tmp_path, "llama")
    stage = decoder_stage.load(folder, Span(1, 3, LAYERS), "float32", "cpu")
    assert compile_layers(stage) == 2
    rows = stage.example(5, 1)
    before, at = rows.clone(), torch.arange(5)
    with torch.inference_mode():
        stage(rows, at, KvCache().step([Rows("a", 0, 5)]), at)
    assert torch.equal(rows, before)


# The parts.


def waves(*shape: int) -> Tensor:
    count = torch.tensor(shape).prod().item()
    return ((torch.arange(count) * 7919) % 2003 - 1001).float().view(shape) / 300


def rounded(exact: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Return arguments of ``assert_close`` that allow the error of one rounding."""
    error = 1e-6 if dtype is torch.float32 else 2.0**-8
    return {"expected": exact, "rtol": error, "atol": 1e-6}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 24, 576, 4096])
@pytest.mark.parametrize("count", [1, 3, 200])
def test_norms_are_exact(
    count: int, width: int, dtype: torch.dtype, threads: int
) -> None:
    given, more, weight = (
        each.to(dtype)
        for each in (waves(count, width), waves(count, width) * 0.3, waves(width))
    )
    both, found = torch.empty_like(given), torch.empty_like(given)
    address = [each.data_ptr() for each in (given, more, both, weight)]
    norm = library().multiworld_norm
    for is_sum in (False, True):
        rest = address[1:3] if is_sum else (0, 0)
        norm(
            *(address[0], *rest, address[3], 1e-5, count, width),
            *(found.data_ptr(), threads, dtype is torch.bfloat16),
        )
        exact = (given + more if is_sum else given).double()
        wanted = functional.rms_norm(exact, (width,), weight.double(), 1e-5)
        torch.testing.assert_close(found.double(), **rounded(wanted, dtype))
    assert torch.equal(both, given + more)  # bfloat16 also rounds to even


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_are_exact(dtype: torch.dtype, threads: int) -> None:
    inf, nan = float("inf"), float("nan")
    odd = [0.0, -0.0, 90.0, -90.0, 1e30, -1e30, inf, nan]
    gate = torch.cat([torch.tensor(odd), waves(40_000) * 5]).to(dtype)
    up = (waves(len(gate)) + 0.1).to(dtype)
    wanted = functional.silu(gate.double()) * up.double()
    library().multiworld_gate(
        *(gate.data_ptr(), up.data_ptr(), len(gate), threads),
        dtype is torch.bfloat16,
    )
    limits = {**rounded(wanted, dtype), "atol": 1e-30}
    torch.testing.assert_close(gate.double(), **limits, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotations_are_exact(dtype: torch.dtype, threads: int) -> None:
    rows, heads, key_heads, size = 70, 6, 2, 32
    angles = [waves(rows, size).to(dtype), waves(rows, size).flip(0).to(dtype)]
    weights = [waves(size).to(dtype), waves(size).flip(0).to(dtype)]
    for has_norms in (False, True):
        given = [waves(rows, n, size).to(dtype) for n in (heads, key_heads)]
        wanted = []
        for each, weight in zip(given, weights, strict=True):
            exact = each.double()
            if has_norms:
                exact = functional.rms_norm(exact, (size,), weight.double(), 1e-6)
                exact = exact.to(dtype).double()
            low, high = exact.chunk(2, -1)
            turned = torch.cat([-high, low], -1)
            cosines, sines = (angle.double()[:, None] for angle in angles)
            wanted.append(exact * cosines + turned * sines)
        library().multiworld_rotate(
            *(each.data_ptr() for each in (*given, *angles)),
            *(each.data_ptr() if has_norms else 0 for each in weights),
            *(1e-6, rows, heads, key_heads, size, threads, dtype is torch.bfloat16),
        )
        for found, exact in zip(given, wanted, strict=True):
            limits = {**rounded(exact, dtype), "atol": 2e-5}
            if has_norms and dtype is torch.bfloat16:  # a norm may be rounded otherwise
                limits["atol"] = 0.02
            torch.testing.assert_close(found.double(), **limits)


def test_types_are_those_of_the_code() -> None:
    """Otherwise ctypes would pass an address as a 32-bit int."""
    for name in ("attend", "norm", "rotate", "gate"):
        function = getattr(library(), f"multiworld_{name}")
        assert function.argtypes[0] is ctypes.c_void_p
