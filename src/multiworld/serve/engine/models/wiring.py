"""The tensors and sizes that pass from stage to stage of a traced module."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch import SymInt, Tensor
from torch.fx import GraphModule, Node

from multiworld.errors import InvalidRequestError, SpecError
from multiworld.serve.spec.stage import Tensors, TensorSpec

# Minimum size in the ranges of ``torch.export``. Its graphs work for smaller sizes,
# too.
MIN_SIZE = 2


@dataclass(frozen=True, slots=True)
class SizeOf:
    """A number computed from the sizes (tensor, dimension) of incoming tensors."""

    compute: Callable[..., int]
    sizes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Constant:
    value: Any


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Sizes of one dimension of an input for which the traced graph is right."""

    name: str
    dimension: int
    low: int
    high: float


@dataclass(frozen=True, slots=True)
class StageInterface:
    """Inputs, outputs and pass-through tensors of one stage."""

    # The arguments of the part: names of tensors, sizes and constants.
    takes: tuple[str | SizeOf | Constant, ...]
    # Names of its results in order; empty: the result is not used.
    gives: tuple[str, ...]
    passes: tuple[str, ...]
    ranges: tuple[SizeRange, ...] = ()

    def check(self, tensors: Tensors) -> None:
        """Raise InvalidRequestError for sizes outside the ranges found by tracing."""
        for each in self.ranges:
            size = tensors[each.name].shape[each.dimension]
            if not each.low <= size <= each.high:
                most = "" if math.isinf(each.high) else f" and at most {each.high:g}"
                raise InvalidRequestError(
                    f"dimension {each.dimension} of {each.name!r} is {size}, but this "
                    f"model takes at least {each.low}{most}, because it was traced "
                    "with an example in this range"
                )

    def argument(self, take: str | SizeOf | Constant, tensors: Tensors) -> Any:
        if isinstance(take, SizeOf):
            sizes = (tensors[name].shape[at] for name, at in take.sizes)
            return int(take.compute(*sizes))
        return take.value if isinstance(take, Constant) else tensors[take]

    def outputs(self, found: Any) -> Tensors:
        if isinstance(found, Mapping):
            found = tuple(found.values())
        values = found if isinstance(found, tuple | list) else (found,)
        if len(values) != len(self.gives):
            raise TypeError(
                f"the module returned {len(values)} values, but outputs= names "
                f"{len(self.gives)}: {', '.join(self.gives)}"
            )
        return {
            name: value for name, value in zip(self.gives, values, strict=True) if name
        }


def interfaces_of(
    split: GraphModule, inputs: Sequence[str], outputs: Sequence[str]
) -> list[StageInterface]:
    """Return the interface of each stage; the calls of the split graph are stages."""
    nodes = list(split.graph.nodes)
    graph_inputs = [node for node in nodes if node.op == "placeholder"]
    calls = [node for node in nodes if node.op == "call_module"]
    returned = _returned(nodes[-1])
    if len(graph_inputs) != len(inputs) or len(returned) != len(outputs):
        raise SpecError(
            f"the module takes {len(graph_inputs)} tensors and returns "
            f"{len(returned)}, but inputs= names {len(inputs)} and outputs= names "
            f"{len(outputs)}"
        )
    names = dict(zip(graph_inputs, inputs, strict=True))
    last_use = {
        arg: number
        for number, call in enumerate(calls)
        for arg in call.args
        if isinstance(arg, Node)
    }
    ends = dict(zip(returned, outputs, strict=True))
    last_use.update(dict.fromkeys(ends, len(calls)))
    names.update(
        {n: ends.get(n, f"value.{n.name}") for c in calls for n in _results(c)}
    )
    made_by = dict.fromkeys(graph_inputs, -1)
    made_by.update({n: i for i, call in enumerate(calls) for n in _results(call)})
    inside = [_placeholders(split, call) for call in calls]
    shaped = {
        arg: placeholder
        for call, placeholders in zip(calls, inside, strict=True)
        for arg, placeholder in zip(call.args, placeholders, strict=True)
        if isinstance(arg, Node)
    }
    sizes = {
        node for node, placeholder in shaped.items() if not _is_tensor(placeholder)
    }
    rows = _rows(shaped, graph_inputs)
    for node, placeholder in shaped.items():
        if made_by[node] >= 0 and node not in sizes:
            _check_rows(placeholder, rows)

    def crosses(node: Node, number: int) -> bool:
        return made_by[node] < number < last_use.get(node, -1) and node not in sizes

    found = [
        StageInterface(
            takes=tuple(
                _take(call, placeholders, n, names, sizes)
                for n in range(len(placeholders))
            ),
            gives=tuple(
                names[n] if n in last_use and n not in sizes else ""
                for n in _results(call)
            ),
            passes=tuple(names[n] for n in made_by if crosses(n, number)),
        )
        for number, (call, placeholders) in enumerate(zip(calls, inside, strict=True))
    ]
    if both := {name for each in found for name in {*each.gives} & {*each.passes}}:
        raise SpecError(
            f"{min(both)!r} is the name of an input and of an output, and both would "
            "be sent to one stage; rename one of them"
        )
    return found


def ranges_of(split: GraphModule, inputs: Sequence[TensorSpec]) -> list[SizeRange]:
    """Return the ranges that tracing found for dimensions that the specs leave open."""
    # The number of rows has no range, because tracing treats one row like several.
    found = []
    nodes = (node for node in split.graph.nodes if node.op == "placeholder")
    for node, spec in zip(nodes, inputs, strict=True):
        for dimension, size in enumerate(node.meta["val"].shape):
            if dimension == 0 or spec.shape[dimension] >= 0:
                continue
            low, high = _limits(size)
            if low > 0 or not math.isinf(high):
                found.append(SizeRange(spec.name, dimension, low, high))
    return found


def _limits(size: int | SymInt) -> tuple[int, float]:
    if not isinstance(size, SymInt):
        return size, size
    found = size.node.shape_env.var_to_range.get(size.node.expr)
    if found is None:
        return 0, math.inf
    low, high = float(found.lower), float(found.upper)
    return (0 if low <= MIN_SIZE else int(low)), high


def _returned(output: Node) -> list[Node]:
    found: Any = output.args[0]
    values = list(found) if isinstance(found, tuple | list) else [found]
    if not all(isinstance(value, Node) for value in values):
        raise SpecError(
            "the module returns something other than tensors; return tensors"
        )
    if len(set(values)) < len(values) or any(v.op == "placeholder" for v in values):
        raise SpecError(
            "the module returns an input, or one tensor twice; return a clone"
        )
    return values


def _results(call: Node) -> list[Node]:
    items = [user for user in call.users if user.target is operator.getitem]
    return sorted(items, key=_index) or [call]


def _index(node: Node) -> int:
    index = node.args[1]
    assert isinstance(index, int)
    return index


def _placeholders(split: GraphModule, call: Node) -> list[Node]:
    stage = split.get_submodule(str(call.target))
    assert isinstance(stage, GraphModule)
    return [node for node in stage.graph.nodes if node.op == "placeholder"]


def _is_tensor(placeholder: Node) -> bool:
    return isinstance(placeholder.meta.get("val"), Tensor)


def _rows(shaped: Mapping[Node, Node], graph_inputs: Sequence[Node]) -> str:
    first = next(shaped[node] for node in graph_inputs if node in shaped)
    return str(first.meta["val"].shape[0])


def _check_rows(placeholder: Node, rows: str) -> None:
    shape = placeholder.meta["val"].shape
    if not shape or str(shape[0]) != rows:
        raise SpecError(
            f"{placeholder.name}, of shape {tuple(map(str, shape))}, would be passed "
            "between stages, but its first dimension is not the number of input rows; "
            "give another cut, or write a factory that returns the stages"
        )


def _take(
    call: Node,
    placeholders: Sequence[Node],
    at: int,
    names: Mapping[Node, str],
    sizes: set[Node],
) -> str | SizeOf | Constant:
    arg, placeholder = call.args[at], placeholders[at]
    if not isinstance(arg, Node):
        return Constant(arg)
    if arg.op == "get_attr":
        raise SpecError(f"{arg.target} is used by several stages; give another cut")
    if arg not in sizes:
        return names[arg]
    return _size(
        placeholder,
        [
            (names[a], p)
            for a, p in zip(call.args, placeholders, strict=True)
            if isinstance(a, Node) and _is_tensor(p)
        ],
    )


def _size(placeholder: Node, tensors: Sequence[tuple[str, Node]]) -> SizeOf:
    """Return a function that computes a number from the sizes of tensors."""
    expression = placeholder.meta["val"].node.expr
    known = {
        size.node.expr: (name, at)
        for name, tensor in tensors
        for at, size in enumerate(tensor.meta["val"].shape)
        if isinstance(size, SymInt) and size.node.expr.is_symbol
    }
    symbols = sorted(expression.free_symbols, key=str)
    if not set(symbols) <= known.keys():
        raise SpecError(
            f"{placeholder.name} (a number, {expression}) would go between stages; "
            "give another cut, or write a factory that returns its stages"
        )
    compute = sympy.lambdify(symbols, expression, modules="math")
    return SizeOf(compute, tuple(known[symbol] for symbol in symbols))
