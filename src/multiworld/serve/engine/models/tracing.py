"""The cutter of an ``nn.Module``: finds the parts, traces, and loads one stage.

If the weights are in a file, the module is built on fake tensors, without memory.
``torch.distributed.pipelining`` traces it once, with a dynamic number of rows, and the
graph of one stage is kept.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline
from torch.utils.flop_counter import FlopCounterMode

from multiworld.backends import torch_names
from multiworld.errors import SpecError
from multiworld.serve.engine.models.partition import chain_partition
from multiworld.serve.engine.models.weights import read_weights
from multiworld.serve.engine.models.wiring import (
    StageInterface,
    interfaces_of,
    ranges_of,
)
from multiworld.serve.spec.datatypes import TORCH_OF
from multiworld.serve.spec.stage import Tensors

if TYPE_CHECKING:
    from multiworld.serve.spec.module import Module

# Number of rows, and size of other dynamic dimensions, in the traced example.
# ``torch.export`` would treat the sizes 0 and 1 as constants.
ROWS, SIZE = 3, 4

# Containers whose children are candidates for parts.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Cutter:
    """Cuts a module into stages and loads them; raises SpecError if it cannot."""

    def __init__(
        self,
        module: Module,
        stages: int | None,  # number of stages; None: one for each part
        # Numbers of the parts with which later stages begin; None: costs are balanced.
        cut: Sequence[int] | None = None,
        min_parts: int = 1,  # minimum number of parts if ``stages`` is None
    ) -> None:
        torch_names.check("tracing")
        self._module = module
        with _tracing():
            self._whole = _build_module(module)
            if stages == 1:
                self.begins = [""]
                return
            costs = _part_costs(module, self._whole, stages or min_parts)
            if stages is None:
                stages, cut = len(costs), range(1, len(costs))
            self.begins = [next(iter(costs)), *_begins(costs, stages, cut)]
            if not self._is_chain:
                self._pipe, self._interfaces = _trace(
                    module, self._whole, self.begins[1:]
                )

    def load(self, number: int, device: str) -> TracedPart:
        stages = len(self.begins)
        with _tracing():
            interface = _chain_interface(self._module, number, stages)
            if stages == 1:
                part = self._whole
            elif self._is_chain:
                assert isinstance(self._whole, nn.Sequential)
                part = _slice(self._whole, number, self.begins[1:])
            else:
                part, interface = (
                    self._pipe.get_stage_module(number),
                    self._interfaces[number],
                )
            if self._module.weights is not None:
                _load_weights(part, Path(self._module.weights).expanduser())
            return TracedPart(part.to(device), interface, device).eval()

    @property
    def _is_chain(self) -> bool:
        """True for an ``nn.Sequential`` cut between children: it needs no tracing."""
        is_flat = all("." not in name for name in self.begins[1:])
        whole = self._whole
        has_hooks = bool(whole._forward_hooks or whole._forward_pre_hooks)
        # A subclass of ``Sequential`` may compute more than its children do.
        is_plain = type(whole).forward is nn.Sequential.forward and not has_hooks
        return isinstance(whole, nn.Sequential) and is_plain and is_flat


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    with torch.inference_mode(mode=False), torch.no_grad(), warnings.catch_warnings():
        # Torch warns about its own tracing, which does not help users.
        warnings.simplefilter("ignore")
        yield


def _build_module(module: Module) -> nn.Module:
    if module.weights is None:
        made = module.make()
    else:
        with torch_names.fake_mode() as mode:
            made = module.make()
            if isinstance(made, nn.Module):
                _unify_fake_modes(made, mode)
    if not isinstance(made, nn.Module):
        raise SpecError(f"make() returned a {type(made).__name__}; return an nn.Module")
    return made.eval()


def _unify_fake_modes(made: nn.Module, mode: Any) -> None:
    """Move all fake tensors to one mode: a deep copy has a mode of its own."""
    known: dict[Tensor, Any] = {}
    for part in made.modules():
        held = itertools.chain(
            part.named_parameters(recurse=False, remove_duplicate=False),
            part.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, tensor in list(held):
            if torch_names.mode_of(tensor) in (None, mode):
                continue
            if tensor not in known:
                fresh = torch.empty(tensor.shape, dtype=tensor.dtype)
                is_parameter = isinstance(tensor, nn.Parameter)
                known[tensor] = nn.Parameter(fresh) if is_parameter else fresh
            setattr(part, name, known[tensor])


def _inputs(module: Module, whole: nn.Module) -> list[Tensor]:
    """Return inputs for tracing: the example's sizes, but with several rows."""
    given = module.example() if module.example is not None else None
    found = []
    with _mode_of(whole):
        for spec in module.inputs:
            sizes = (
                list(given[spec.name].shape) if given is not None else list(spec.shape)
            )
            shape = [ROWS, *(SIZE if size < 0 else size for size in sizes[1:])]
            tensor = torch.zeros(shape, dtype=TORCH_OF[spec.datatype])
            for dimension, size in enumerate(spec.shape):
                if dimension == 0 or (size < 0 and shape[dimension] > 1):
                    torch_names.mark_dynamic(tensor, dimension)
            found.append(tensor)
    return found


def _mode_of(whole: nn.Module) -> Any:
    for tensor in itertools.chain(whole.parameters(), whole.buffers()):
        if (mode := torch_names.mode_of(tensor)) is not None:
            return mode
    return contextlib.nullcontext()


# Finding parts.


def _part_costs(module: Module, whole: nn.Module, min_parts: int) -> dict[str, float]:
    """Return the approximate operations of each part, in execution order."""
    depth, previous = 0, -1
    while True:
        names = list(_candidates(whole, depth))
        found = _run(module, whole, names)
        if len(found) >= min_parts:
            return found
        if len(names) == previous:
            raise SpecError(
                f"{type(whole).__name__} has {len(found)} parts that run once each "
                f"({', '.join(found) or 'none'}), so it cannot be cut into {min_parts} "
                "stages; use fewer stages"
            )
        depth, previous = depth + 1, len(names)


def _candidates(
    module: nn.Module, depth: int, prefix: str = "", *, is_item: bool = False
) -> Iterator[str]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_container = isinstance(child, CONTAINERS)
        holds_one = any(
            isinstance(m, CONTAINERS) and len(m) > 1 for m in child.modules()
        )
        has_children = any(True for _ in child.children())
        if is_container or (holds_one and not is_item):
            yield from _candidates(child, depth, f"{path}.", is_item=is_container)
        elif depth > 0 and has_children:
            yield from _candidates(child, depth - 1, f"{path}.", is_item=is_item)
        else:
            yield path


def _run(module: Module, whole: nn.Module, names: Sequence[str]) -> dict[str, float]:
    order: list[str] = []
    hooks = [
        whole.get_submodule(name).register_forward_pre_hook(
            lambda _module, _inputs, name=name: order.append(name)
        )
        for name in names
    ]
    counter = FlopCounterMode(display=False)
    try:
        with _mode_of(whole), torch.no_grad(), counter:
            whole(*_inputs(module, whole))
    except Exception as error:
        raise SpecError(
            f"{type(whole).__name__} cannot be run on its example: {error}; inputs= "
            "must match the arguments of forward, in order"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    flops = {
        name.partition(".")[2]: sum(counts.values())
        for name, counts in counter.get_flop_counts().items()
    }
    return {
        name: flops.get(name, 0)
        + sum(p.numel() for p in whole.get_submodule(name).parameters())
        + 1.0
        for name in order
        if order.count(name) == 1
    }


def _begins(
    costs: dict[str, float], stages: int, cut: Sequence[int] | None
) -> list[str]:
    """Return the name of the first part of each stage after the first."""
    names = list(costs)
    if cut is None:
        spans = chain_partition(list(costs.values()), stages)
        cut = [begin for begin, _ in spans[1:]]
    if cut and cut[-1] >= len(names):
        raise SpecError(
            f"cut={list(cut)} is out of range; there are {len(names)} parts: "
            f"{', '.join(names)}"
        )
    return [names[number] for number in cut]


# Cutting.


def _slice(whole: nn.Sequential, number: int, names: Sequence[str]) -> nn.Module:
    # Do not use ``named_children``: if the same child occurs several times, it lists
    # this child only once.
    children = list(whole._modules)
    edges = [0, *(children.index(name) for name in names), len(children)]
    begin, end = edges[number], edges[number + 1]
    part = nn.Sequential()
    for name in children[begin:end]:
        part.add_module(name, whole._modules[name])
    return part


def _chain_interface(module: Module, number: int, stages: int) -> StageInterface:
    takes = [s.name for s in module.inputs] if number == 0 else ["value"]
    is_last = number == stages - 1
    gives = [s.name for s in module.outputs] if is_last else ["value"]
    return StageInterface(takes=tuple(takes), gives=tuple(gives), passes=())


def _trace(
    module: Module, whole: nn.Module, names: Sequence[str]
) -> tuple[Pipe, list[StageInterface]]:
    split = dict.fromkeys(names, SplitPoint.BEGINNING)
    try:
        pipe = pipeline(whole, tuple(_inputs(module, whole)), split_spec=split)
    except Exception as error:
        reason = str(error.__cause__ or error)
        raise SpecError(
            f"{type(whole).__name__} cannot be traced with a dynamic number of rows: "
            f"{reason[:600]}; write a factory that returns its stages"
        ) from error
    interfaces = interfaces_of(
        pipe.split_gm,
        [spec.name for spec in module.inputs],
        [spec.name for spec in module.outputs],
    )
    if len(interfaces) != len(names) + 1:
        raise SpecError(
            f"{type(whole).__name__} was cut into {len(interfaces)} stages, not "
            f"{len(names) + 1}: nothing runs between two cuts; give another cut"
        )
    ranges = tuple(ranges_of(pipe.split_gm, module.inputs))
    interfaces[0] = replace(interfaces[0], ranges=ranges)
    return pipe, interfaces


# Weights.


def _load_weights(part: nn.Module, path: Path) -> None:
    # List tied tensors by all of their names, so that each module that has the tensor
    # gets the one in the file.
    held = itertools.chain(
        part.named_parameters(remove_duplicate=False),
        part.named_buffers(remove_duplicate=False),
    )
    wanted = dict(held)
    found = read_weights(path, set(wanted))
    for name in wanted.keys() - found.keys():
        others = (other for other in found if wanted[other] is wanted[name])
        if (other := next(others, None)) is not None:
            found[name] = found[other]
    missing = sorted(set(wanted) - found.keys())
    unsaved = {
        f"{name}.{buffer}" if name else buffer
        for name, module in part.named_modules(remove_duplicate=False)
        for buffer in module._non_persistent_buffers_set
    }
    if lost := [name for name in missing if name in unsaved]:
        raise SpecError(
            f"{path} lacks {lost[:3]}, because a state_dict omits non-persistent "
            "buffers; register them as persistent, or leave out weights="
        )
    if missing:
        raise SpecError(
            f"{path} lacks {missing[:3]}; save the module's whole state_dict, and "
            "register all tensors that forward uses as parameters or buffers"
        )
    state = {name: found[name].to(tensor.dtype) for name, tensor in wanted.items()}
    try:
        part.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:
        raise SpecError(
            f"{path} does not fit: {error}; save the weights again"
        ) from error


class TracedPart(nn.Module):
    """A part of a module as a stage: takes and returns a dict of tensors."""

    def __init__(self, part: nn.Module, interface: StageInterface, device: str) -> None:
        super().__init__()
        self.part, self._interface = part, interface
        if isinstance(part, torch.fx.GraphModule) and device != "cpu":
            _move_constants(part, device)

    def train(self, mode: bool = True) -> TracedPart:
        """Do nothing: a traced module stays in the mode in which it was traced."""
        return self

    def forward(self, tensors: Tensors) -> Tensors:
        interface = self._interface
        interface.check(tensors)
        found = self.part(
            *(interface.argument(take, tensors) for take in interface.takes)
        )
        outputs = interface.outputs(found)
        return {**outputs, **{name: tensors[name] for name in interface.passes}}


def _move_constants(part: torch.fx.GraphModule, device: str) -> None:
    """Create the constants of the graph (positions, masks) on ``device``."""
    for module in part.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if "device" in node.kwargs:
                node.update_kwarg("device", torch.device(device))
        module.recompile()
