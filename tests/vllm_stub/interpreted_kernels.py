"""Plugin of vLLM: kernels that Triton's interpreter cannot run, in torch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

# Modules of vLLM that call the kernel of top_k and top_p by this name.
CALLERS = (
    "vllm.v1.sample.ops.topk_topp_sampler",
    "vllm.v1.worker.gpu.sample.sampler",
    "vllm.v1.worker.gpu.sample.states",
)
NAME = "apply_top_k_top_p"


def register() -> None:
    """Put torch's version in place of the kernel, in each process of vLLM."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    modules = [importlib.import_module(name) for name in CALLERS]
    in_torch = modules[0].apply_top_k_top_p_pytorch

    def apply(logits: Any, top_k: Any, top_p: Any) -> Any:
        return logits if top_k is top_p is None else in_torch(logits, top_k, top_p)

    for module in modules:
        if hasattr(module, NAME):
            setattr(module, NAME, apply)
    _make_masks_bool()


def _make_masks_bool() -> None:
    """Make masks bool: the interpreter's numpy refuses masks of integers."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder

    def with_mask(create: Callable[..., Any], place: int) -> Callable[..., Any]:
        def made(self: Any, *given: Any, **options: Any) -> Any:
            parts = list(given)
            mask = parts[place]
            if mask.data.dtype != bool:
                data = mask.data.astype(bool)
                parts[place] = interpreter.TensorHandle(data, mask.dtype)
            return create(self, *parts, **options)

        return made

    builder.create_masked_load = with_mask(builder.create_masked_load, 1)
    builder.create_masked_store = with_mask(builder.create_masked_store, 2)
