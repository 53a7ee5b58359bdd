"""llama.cpp's server from the package xllamacpp, with the flags of ``llama-server``.

This script runs in the environment of ``engine_python``; it does not import multiworld.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable
from typing import Any

# Names of xllamacpp's parameters that differ from the names of the flags.
NAMES = {
    "ctx_size": "n_ctx",
    "parallel": "n_parallel",
    "cache_ram": "cache_ram_mib",
    "batch_size": "n_batch",
    "ubatch_size": "n_ubatch",
    "embeddings": "embedding",
    "jinja": "use_jinja",
    "mmap": "use_mmap",
}


def parameters_of(made: Any, flags: list[str], adapter: Callable[[str], Any]) -> Any:
    """Set parameters by flags; ``adapter`` makes the value for an adapter's file."""
    # A flag sets the parameter of the same name: ``--n-ctx 5`` sets ``n_ctx``.
    for flag, text in itertools.pairwise([*flags, "--"]):
        if not flag.startswith("--") or flag == "--":
            continue
        name = _named(flag[2:].replace("-", "_"))
        if name == "model":
            made.model.path = text
        elif name == "host":
            made.hostnames = [text]
        elif name == "lora":
            made.lora_adapters = [*made.lora_adapters, adapter(text)]
        elif name == "threads":
            made.cpuparams.n_threads = made.cpuparams_batch.n_threads = int(text)
        elif name == "threads_batch":
            made.cpuparams_batch.n_threads = int(text)
        elif name == "no_mmap" and hasattr(made, "load_mode"):
            made.load_mode = type(made.load_mode).LLAMA_LOAD_MODE_NONE
        elif name.startswith("no_") and hasattr(made, off := _named(name[3:])):
            setattr(made, off, False)
        elif not hasattr(made, name):
            sys.exit(f"xllamacpp has no parameter {name}")
        else:
            setattr(made, name, value_of(getattr(made, name), text))
    return made


def _named(flag: str) -> str:
    return NAMES.get(flag, flag)


def value_of(default: Any, text: str) -> Any:
    """Convert the value of a flag to the type of its parameter."""
    if isinstance(default, bool):
        return text.startswith("--") or text == "true"
    return type(default)(text)


def main(flags: list[str]) -> None:
    """Serve until SIGTERM or SIGINT."""
    import xllamacpp

    def adapter(path: str) -> Any:
        return xllamacpp.CommonAdapterLoraInfo(path, 1.0)

    server = xllamacpp.Server(parameters_of(xllamacpp.CommonParams(), flags, adapter))
    assert server is not None  # the server runs while this object exists
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main(sys.argv[1:])
