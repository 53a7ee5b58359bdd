"""Decoder layers as compiled code (``layers.c``), on a CPU.

Besides its matmuls and its attention, a layer in transformers calls about 50 torch
operators; here it calls four C functions. Each layer of a stage is computed once in a
trial. If the layer has the parts of a Llama layer, and the compiled layer gives the
same results within a tolerance, the compiled layer replaces it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from multiworld.serve.engine.compute.layer_code import (
    DTYPES,
    LANES,
    can_run,
    library,
)
from multiworld.serve.engine.models.attention import Attention, AttentionCall
from multiworld.serve.engine.models.integer_linear import IntegerLinear

logger = logging.getLogger("multiworld.serve")

# Maximum errors in the trial, relative to what a layer adds to a row. In int8, an error
# in the last bit of a norm can change an integer. SmolLM2 has errors of 3e-4 in int8,
# 1e-6 in float32, and 4e-3 in bfloat16. A wrong activation (GELU instead of SiLU)
# causes an error of 8e-2.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
INT8_TOLERANCE = 3e-3

PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PRODUCTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class CompiledLayer:
    """A decoder layer: a norm, attention, a norm, and a gated feed-forward."""

    def __init__(
        self,
        layer: Any,
        attend: Callable[..., Tensor],  # ``DecoderStage.attend``
        options: dict[str, Any],  # keyword arguments for ``attend``
    ) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attend = functools.partial(attend, attention.layer_idx, **options)
        self._size: int = attention.head_dim
        self._query, self._key = attention.q_proj, attention.k_proj
        self._value, self._out = attention.v_proj, attention.o_proj
        self._gate, self._up, self._down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self._before = _Norm(layer.input_layernorm)
        self._after = _Norm(layer.post_attention_layernorm)
        own = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        norms = [None if norm is None else _Norm(norm) for norm in own]
        # Keeps the weights alive whose addresses are in ``_weights``.
        self._norms = norms
        self._weights = [0 if norm is None else norm.address for norm in norms]
        self._epsilon = norms[0].epsilon if norms[0] is not None else 0.0
        self._code = library()

    def __call__(
        self,
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: tuple[Tensor, Tensor],
        **__: Any,
    ) -> Tensor:
        given = hidden_states[0].contiguous()  # [rows, hidden]
        count, threads, size = len(given), torch.get_num_threads(), self._size
        normed = self._before(given, threads)
        query: Tensor = self._query.forward(normed).contiguous()
        key: Tensor = self._key.forward(normed).contiguous()
        value: Tensor = self._value.forward(normed)
        cosines, sines = (each.contiguous() for each in position_embeddings)
        heads, key_heads = query.shape[1] // size, key.shape[1] // size
        is_bf16 = given.dtype is torch.bfloat16
        self._code.multiworld_rotate(
            query.data_ptr(),
            key.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            *self._weights,
            self._epsilon,
            count,
            heads,
            key_heads,
            size,
            threads,
            is_bf16,
        )
        found = self._attend(
            query.view(count, heads, size).transpose(0, 1),
            key.view(count, key_heads, size).transpose(0, 1),
            value.view(count, key_heads, size).transpose(0, 1),
        )
        more: Tensor = self._out.forward(found.reshape(count, -1)).contiguous()
        both, normed = self._after.of_sum(given, more, threads)
        gate: Tensor = self._gate.forward(normed).contiguous()
        up: Tensor = self._up.forward(normed).contiguous()
        self._code.multiworld_gate(
            gate.data_ptr(), up.data_ptr(), gate.numel(), threads, is_bf16
        )
        return both.add_(self._down.forward(gate))[None]


class _Norm:
    """An RMS norm."""

    def __init__(self, module: Any) -> None:
        self._weight = module.weight.detach()
        self.address = self._weight.data_ptr()
        self.epsilon = _epsilon(module) or 0.0
        self._norm = library().multiworld_norm

    def __call__(self, given: Tensor, threads: int) -> Tensor:
        found = torch.empty_like(given)
        self._write(given, 0, 0, found, threads)
        return found

    def of_sum(
        self, given: Tensor, more: Tensor, threads: int
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of two tensors, and the norm of the sum."""
        both, found = torch.empty_like(given), torch.empty_like(given)
        self._write(given, more.data_ptr(), both.data_ptr(), found, threads)
        return both, found

    def _write(
        self, given: Tensor, more: int, both: int, found: Tensor, threads: int
    ) -> None:
        rows, width = given.shape
        self._norm(
            given.data_ptr(),
            more,
            both,
            self.address,
            self.epsilon,
            rows,
            width,
            found.data_ptr(),
            threads,
            given.dtype is torch.bfloat16,
        )


class _Trial(Attention):
    """Attention that records its options; uses the query, the key and the value."""

    def __init__(self) -> None:
        self.options: dict[int, dict[str, Any]] = {}

    def compute(self, call: AttentionCall) -> Tensor:
        self.options[call.layer] = {
            "scale": call.scale,
            "window": call.window,
            "softcap": call.softcap,
        }
        query = call.query
        key, value = (
            each.repeat_interleave(len(query) // len(each), 0)
            for each in (call.key, call.value)
        )
        # Do not use the dot product of a row's query and key: it would hide wrong
        # rotations, because rotating both in the same way does not change it.
        found = value * query.tanh() + key.tanh()
        return found.transpose(0, 1).contiguous()


def _epsilon(norm: Any) -> float | None:
    found: float | None = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return found


def _is_norm(module: Any, width: int) -> bool:
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, Tensor)
        and weight.shape == (width,)
        and weight.dtype in DTYPES
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and _epsilon(module) is not None
        and getattr(module, "bias", None) is None
    )


def _has_parts(layer: nn.Module) -> bool:
    """Return whether a layer has the parts that C expects; a trial checks the rest."""
    if {name for name, _ in layer.named_children()} != PARTS:
        return False
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    own = {name for name, _ in attention.named_children()}
    size = getattr(attention, "head_dim", None)
    if (
        own not in (PRODUCTS, PRODUCTS | HEAD_NORMS)
        or {name for name, _ in mlp.named_children()} != FEED_FORWARD
        or not isinstance(size, int)
    ):
        return False
    products = [getattr(attention, name) for name in sorted(PRODUCTS)]
    products += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if not all(hasattr(each, "out_features") for each in products):
        return False
    width, inner = attention.o_proj.out_features, mlp.gate_proj.out_features
    key, value = (each.out_features for each in (attention.k_proj, attention.v_proj))
    # In some models ``q_proj`` also computes gates, and then has more outputs than
    # ``o_proj`` has inputs.
    is_square = getattr(attention.o_proj, "in_features", None) == (
        attention.q_proj.out_features
    )
    return (
        is_square
        and width % LANES == inner % LANES == size % (2 * LANES) == 0
        and attention.q_proj.out_features % size == key % size == 0
        and key == value
        and mlp.up_proj.out_features == inner
        and mlp.down_proj.out_features == width
        and all(_is_norm(getattr(attention, name), size) for name in own & HEAD_NORMS)
        and _is_norm(layer.input_layernorm, width)
        and _is_norm(layer.post_attention_layernorm, width)
    )


def _fits(layer: Any, hidden: Tensor, kwargs: dict[str, Any]) -> bool:
    """Return whether a layer is called as C expects."""
    angles = kwargs.get("position_embeddings")
    if not isinstance(angles, tuple) or len(angles) != 2:
        return False
    shape = 1, hidden.shape[1], layer.self_attn.head_dim
    weights = [
        module.weight for name, module in layer.named_modules() if name.endswith("norm")
    ]
    dtypes = {each.dtype for each in (hidden, *angles, *weights)}
    is_one = len(dtypes) == 1 and dtypes <= {*DTYPES}
    return is_one and len(hidden) == 1 and all(a.shape == shape for a in angles)


@dataclass(frozen=True, slots=True)
class _Call:
    layer: Any
    hidden: Tensor
    kwargs: dict[str, Any]
    found: Any


def compile_layers(stage: Any) -> int:
    """Replace layers of a stage with compiled ones; return how many."""
    layers = [module for module in stage.modules() if _has_parts(module)]
    if not layers or not can_run():
        return 0
    trial, calls = _Trial(), list[_Call]()

    def note(layer: nn.Module, args: Any, kwargs: Any, found: Any) -> None:
        if args:
            calls.append(_Call(layer, args[0], kwargs, found))

    handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        # Test both near and far positions: some models scale queries from a certain
        # position on.
        last = stage.max_positions
        positions = torch.tensor([1, 3, last // 2, 2 * last])
        given = stage.example(len(positions), 0)
        stage(given, positions, trial, torch.tensor([0]))
    except IndexError:  # the table of learned positions is too short
        return 0
    finally:
        for handle in handles:
            handle.remove()
        # A far position changes some rotary embeddings; computing near positions resets
        # them.
        positions = torch.arange(4)
        stage(stage.example(4, 0), positions, _Trial(), positions[:1])
    return sum(_replace(stage, trial, call) for call in calls)


def _replace(stage: Any, trial: _Trial, call: _Call) -> bool:
    """Replace a layer if the compiled one gives the same results."""
    if not _fits(call.layer, call.hidden, call.kwargs):
        return False
    options = trial.options[call.layer.self_attn.layer_idx]
    made = CompiledLayer(call.layer, stage.attend, options)
    if not isinstance(call.found, Tensor) or call.found.shape != call.hidden.shape:
        return False
    # Scale rows down, because a large row would hide what the layer adds to it. Scaling
    # does not change what is added, because the layer normalizes its input.
    added, size = _norms(call.found - call.hidden), _norms(call.hidden)
    if not (added > 0.0).all() or not _is_silu(call.layer.mlp.act_fn):
        return False
    given = call.hidden * (added / size).clamp(max=1.0).log2().floor().exp2()
    given = given.to(call.hidden.dtype)
    try:
        with stage.attending(trial):
            found, wanted = (
                layer(given, **call.kwargs) for layer in (made, call.layer)
            )
    except (RuntimeError, ValueError) as error:
        logger.info("a layer is not compiled: %s", error)
        return False
    limit = TOLERANCES[given.dtype]
    if any(isinstance(each, IntegerLinear) for each in call.layer.modules()):
        limit = max(limit, INT8_TOLERANCE)
    if not (_norms(found - wanted) <= limit * _norms(wanted - given)).all():
        return False
    call.layer.forward = made
    return True


def _is_silu(function: Any) -> bool:
    x = torch.linspace(-8.0, 8.0, 64)
    try:
        return torch.allclose(function(x), functional.silu(x), rtol=1e-4, atol=1e-6)
    except (RuntimeError, TypeError):
        return False


def _norms(rows: Tensor) -> Tensor:
    found: Tensor = rows.float().norm(dim=-1, keepdim=True)
    return found
