"""llama.cpp as an engine: ``llama-server``, or xllamacpp's server in its environment.

llama.cpp's own sampler draws the tokens. Each token is a separate request, whose seed
is derived from the seed of the sequence, the choice and the token's index. So an
interrupted sequence continues exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multiworld.errors import SpecError
from multiworld.serve.engine.external import xllamacpp_server
from multiworld.serve.engine.external.engine_args import flags_of, refuse_reserved
from multiworld.serve.engine.external.engine_server import EngineServer
from multiworld.serve.engine.external.token_server_engine import TokenServerEngine
from multiworld.serve.engine.external.token_servers import LlamaCpp
from multiworld.serve.engine.external.whole_engine import EngineSettings

# Arguments that the service sets itself, each with the field of the spec to use
# instead; empty: there is none.
RESERVED = {
    "host": "",
    "port": "",
    "parallel": "generation: max_num_seqs",
    "ctx_size": "generation: max_model_len",
    "api_key": "",
    "cache_prompt": "",
    "cache_ram": "",
    "cache_reuse": "",
    "kv_unified": "",
    "slot_prompt_similarity": "",
    "spec_type": "",
    "model_draft": "",
    "embedding": "",
    "lora": "adapters",
    "lora_scaled": "adapters",
    "lora_init_without_apply": "",
}

ALL_LAYERS = 999  # more layers than any model has, so that all are on the GPU


class LlamaCppEngine(TokenServerEngine):
    """The llama.cpp server of a replica."""

    def __init__(self, settings: EngineSettings) -> None:
        # One slot more than sequences, for a probe.
        self._parallel = settings.max_num_seqs + 1
        self._context = self._parallel * (settings.max_model_len or 0)
        super().__init__(settings, self._context)
        self._dialect = LlamaCpp(tuple(settings.adapters))
        for path in settings.adapters.values():
            if not Path(path).expanduser().is_file():
                raise SpecError(f"adapters: there is no file {path}; give a GGUF file")
        refuse_reserved(settings.args, RESERVED)
        weights_of(settings)

    async def start(self) -> None:
        settings = self._settings
        self._server = EngineServer("llama.cpp")
        self.phase = "loading"
        await self._server.start(self._command(self._server.port), settings)
        await self.warm_up()

    def _command(self, port: int) -> list[str]:
        settings = self._settings
        own: dict[str, Any] = {
            "parallel": self._parallel,
            "ctx_size": self._context,
            # The cache is off, because one tenant could find out the prompts of
            # another.
            "cache_ram": 0,
        }
        command = server_command(settings, port, own)
        for path in settings.adapters.values():
            command += ["--lora", str(Path(path).expanduser())]
        if settings.adapters:
            command.append("--lora-init-without-apply")
        return command


def server_command(
    settings: EngineSettings, port: int, own: Mapping[str, Any]
) -> list[str]:
    """Return the command line of llama.cpp's server with further arguments ``own``."""
    every: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "threads": int(settings.cpus or 0) or None,
        "n_gpu_layers": ALL_LAYERS if settings.device != "cpu" else 0,
    }
    if not {"mmap", "no_mmap", "load_mode"} & settings.args.keys():
        # Do not map the file: it could be overwritten while it is served.
        every["no_mmap"] = True
    flags = flags_of({**every, **own, **settings.args, "model": weights_of(settings)})
    if not settings.python:
        return ["llama-server", *flags]
    return [settings.python, "-P", xllamacpp_server.__file__, *flags]


def weights_of(settings: EngineSettings) -> str:
    """Return the GGUF file: ``engine_args: model``, or the only one in the folder."""
    given = settings.args.get("model")
    if given is not None:
        path = Path(str(given)).expanduser()
        if not path.is_file():
            raise SpecError(f"engine_args: model: there is no file {path}")
        return str(path)
    found = sorted(Path(settings.path).expanduser().glob("*.gguf"))
    if len(found) != 1:
        raise SpecError(
            f"llama.cpp needs one GGUF file, but {settings.path} has {len(found)}; "
            "give the path of one as engine_args: model"
        )
    return str(found[0])
