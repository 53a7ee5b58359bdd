"""Batch-invariant versions of the elementwise functions that a module calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from multiworld.serve.engine.compute.batch_invariant_layers import (
    InvariantElements,
    is_inside,
)

# Roots are exact in float32, but not in half precision, and every norm takes some.
ROOTS = frozenset((torch.rsqrt, Tensor.rsqrt, torch.rsqrt_, Tensor.rsqrt_))
POWERS = frozenset(
    (torch.pow, Tensor.pow, Tensor.__pow__, Tensor.__ipow__, Tensor.pow_)
)
EXACT = (2, 3, 0.5, -1, -2)  # exponents for which torch multiplies or divides
HALF = (torch.bfloat16, torch.float16)
# The functions that these apply to a tensor in place.
IN_PLACE: dict[Any, Any] = {
    torch.sigmoid_: torch.sigmoid,
    Tensor.sigmoid_: torch.sigmoid,
    torch.tanh_: torch.tanh,
    Tensor.tanh_: torch.tanh,
    torch.exp_: torch.exp,
    Tensor.exp_: torch.exp,
    torch.exp2_: torch.exp2,
    Tensor.exp2_: torch.exp2,
    torch.rsqrt_: torch.rsqrt,
    Tensor.rsqrt_: torch.rsqrt,
    torch.celu_: functional.celu,
    torch.selu_: functional.selu,
    functional.elu_: functional.elu,
    Tensor.pow_: torch.pow,
    Tensor.__ipow__: torch.pow,
}
FUNCTIONS = frozenset(
    (
        *(torch.sigmoid, Tensor.sigmoid, functional.sigmoid, functional.logsigmoid),
        *(torch.tanh, Tensor.tanh, functional.tanh, functional.tanhshrink),
        *(torch.special.expit, torch.sinh, Tensor.sinh, torch.erf, Tensor.erf),
        *(torch.exp, Tensor.exp, torch.exp2, Tensor.exp2, torch.special.exp2),
        *(torch.expm1, Tensor.expm1, torch.log, Tensor.log, torch.log1p, Tensor.log1p),
        *(torch.special.erf, torch.celu, torch.selu, functional.mish),
        *(functional.silu, functional.gelu, functional.softplus, functional.softsign),
        *(functional.elu, functional.celu, functional.selu, functional.hardswish),
        *(functional.hardsigmoid, *ROOTS, *POWERS, *IN_PLACE),
    )
)


class InvariantFunctions(TorchFunctionMode):
    """While it is active, elementwise functions are batch-invariant."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False  # whether one was called

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is functional.glu:
            return self._glu(*args, **given)
        if func is Tensor.__rpow__:
            func, args = torch.pow, (args[1], args[0])
        if func not in FUNCTIONS or is_inside():
            return func(*args, **given)
        plain = IN_PLACE.get(func, func)
        values = [*args] or [given.pop("input", None)]
        first, *others = values
        if func in POWERS and "exponent" in given:
            others = [given.pop("exponent")]
        if func is torch.pow and others and not isinstance(first, Tensor):
            plain, first, others = functools.partial(torch.pow, first), others[0], []
        named = (value for name, value in given.items() if name != "out")
        has_more = any(isinstance(each, Tensor) for each in (*others, *named))
        is_known = isinstance(first, Tensor) and first.is_floating_point()
        if (
            has_more
            or not (is_known and first.ndim)
            or (func in POWERS and others and others[0] in EXACT)
            or (func in ROOTS and first.dtype not in HALF)
        ):
            return func(*args, **(kwargs or {}))
        out = given.pop("out", None)
        is_in_place = given.pop("inplace", False) or func in IN_PLACE
        found = self._applied(lambda x: plain(x, *others, **given), first)
        if out is not None and out.shape != found.shape:
            out.resize_(found.shape)
        target = first if is_in_place else out
        return found if target is None else target.copy_(found)

    def _glu(self, input: Tensor, dim: int = -1) -> Tensor:
        if input.shape[dim] % 2:
            return functional.glu(input, dim)  # raises an error
        values, gates = input.chunk(2, dim)
        return values * self._applied(torch.sigmoid, gates)

    def _applied(self, function: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        """Return the results, laid out as torch would."""
        self.found = True
        found = InvariantElements(function)(given)
        if found.stride() == given.stride():
            return found
        return torch.empty_like(given).copy_(found)


class _InvariantForward:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with InvariantFunctions():
            return self._forward(*args, **kwargs)


def make_functions_invariant(module: nn.Module) -> None:
    """Make the elementwise functions that a module calls batch-invariant, in place.

    Each operation of the module then costs about two microseconds more, and these
    functions several times their time on small tensors.
    """
    each: Any = module
    each.forward = _InvariantForward(module.forward)
