"""The fields of a YAML spec, each with its meaning, unit and default. Pure.

The fields' docstrings are the reference of the spec: editors show them through the JSON
Schema, and ``docs/serve/spec.md`` is generated from them.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from multiworld.serve.spec.identity import Identity

NAME = r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$"
VERSION = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
FACTORY = r"^[\w.]+:\w+$"
REVISION = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"
ENGINE = r"^([a-z][a-z0-9_.-]*|[\w.]+:\w+)$"
LAUNCHER = r"^([a-z][a-z0-9_]*|[\w.]+:\w+)$"
DEVICE = r"^(cpu|cuda(:\d+)?)$"
# ``*``, or an origin as browsers send it: scheme, host and port.
ORIGIN = r"^(\*|https?://[^/\s*]+)$"
PATTERNS = {
    NAME: "use lower-case letters, digits, '.', '_' and '-', at most 64",
    VERSION: "use letters, digits, '.', '_' and '-', at most 63",
    FACTORY: "write package.module:function",
    REVISION: "write a commit, a tag or a branch",
    ENGINE: "write vllm, llama.cpp, openai, or package.module:function of an adapter",
    LAUNCHER: "write local, ray, or package.module:function",
    DEVICE: "write cpu, cuda or cuda:N",
    ORIGIN: "write *, or scheme, host and port, such as https://chat.example.com",
}
"""Remedies for strings that do not match a pattern, by pattern."""

Seconds = Annotated[float, Field(gt=0, le=86400, strict=True)]
# Seconds after which a process is replaced. Below 0.1 s, every process would be.
Patience = Annotated[float, Field(ge=0.1, le=86400, strict=True)]
Delay = Annotated[float, Field(ge=0, le=86400, strict=True)]
Mark = Annotated[str, Field(min_length=1, max_length=64)]
Count = Annotated[int, Field(ge=1, le=4096, strict=True)]


class _Strict(BaseModel):
    """A model that rejects unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True
    )


class ReplicaRange(_Strict):
    """The range within which `multiworld scale` changes the replicas of a stage."""

    min_replicas: Count = 1
    """Minimum number of replicas."""
    max_replicas: Count
    """Maximum number of replicas."""

    @model_validator(mode="after")
    def _ordered(self) -> ReplicaRange:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is greater than max_replicas; swap them")
        return self


class AutoscalingConfig(_Strict):
    """Autoscaling of a stage; names and meanings are those of Ray Serve."""

    min_replicas: Annotated[int, Field(ge=0, le=4096, strict=True)] = 1
    """Minimum number of replicas. 0: no replica runs while there is no traffic, and the
    first request then waits until a replica has started."""
    max_replicas: Count
    """Maximum number of replicas."""
    initial_replicas: Annotated[int, Field(ge=0, le=4096, strict=True)] | None = None
    """Number of replicas at the start; `min_replicas` by default."""
    target_ongoing_requests: Annotated[float, Field(gt=0, le=1e6, strict=True)] = 2.0
    """Target for the average number of requests that are queued or computed at a
    replica. With `objective_ms`, autoscaling works towards that objective instead."""
    upscale_delay_s: Delay = 30.0
    """Seconds for which the load must need more replicas before autoscaling starts any.
    There is no delay if no replica runs, or if queued requests already miss the
    objective."""
    downscale_delay_s: Delay = 600.0
    """Seconds for which fewer replicas must suffice before autoscaling drains any."""
    downscale_to_zero_delay_s: Delay | None = None
    """Like `downscale_delay_s`, but for the last replica; by default the same value."""
    look_back_period_s: Seconds = 30.0
    """Seconds over which arrivals are averaged."""
    upscaling_factor: Annotated[float, Field(gt=0, le=100, strict=True)] = 1.0
    """Number of replicas to start at a time, as a multiple of the number of missing
    replicas (rounded up)."""
    downscaling_factor: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    """Share of the surplus replicas to drain at a time (at least one replica)."""
    metrics_interval_s: Annotated[float, Field(ge=0.1, le=86400, strict=True)] = 1.0
    """Seconds between scaling decisions. A model uses the smallest value among its
    stages. (Ray Serve's default is 10.)"""

    @model_validator(mode="after")
    def _ordered(self) -> AutoscalingConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is greater than max_replicas; swap them")
        first = self.initial_replicas
        if first is not None and not self.min_replicas <= first <= self.max_replicas:
            raise ValueError(
                f"initial_replicas must be from {self.min_replicas} (min_replicas) to "
                f"{self.max_replicas} (max_replicas)"
            )
        return self


class StageSpec(_Strict):
    """One stage of a model."""

    name: str = Field(default="", max_length=64)
    """Display name of the stage; by default its number. `multiworld plan` also shows
    the name that the model gives to the stage."""
    replicas: Count | ReplicaRange = 1
    """Number of replicas, or a range. With a range, the stage starts with the minimum,
    and `multiworld scale` changes the number within the range."""
    autoscaling_config: AutoscalingConfig | None = None
    """Autoscaling, in place of `replicas`: the number of replicas follows the load."""
    spares: Annotated[int, Field(ge=0, le=64, strict=True)] = 0
    """Number of spares: replicas that are started and loaded in advance, but get no
    work. When a replica is lost, or more are needed, a spare takes over at once. Spares
    are booked like other replicas; a stage that is scaled to zero has none."""
    max_batch_size: Count = 16
    """Maximum number of rows in a batch. Not for generated text: set `max_num_seqs` and
    `max_num_batched_tokens` there."""
    max_wait_ms: Annotated[float, Field(ge=0, le=10_000, strict=True)] = 0.0
    """Maximum milliseconds that the oldest request waits for others to fill its batch.
    0: a batch takes the requests that arrived while the previous batch was computed.
    Not for generated text."""
    compute_s: Seconds | None = None
    """Maximum seconds to compute one batch; a replica that takes longer exits and is
    replaced. By default a replica exits once a batch has taken 30 s and all requests of
    the batch are more than 10 s past their deadlines. If the model generates text, a
    replica exits by default once a step has taken 30 s."""
    max_ongoing_requests: Count = 32
    """Maximum number of requests that one sender (a gateway, or a replica of the
    previous stage) may have outstanding at a replica. Not for generated text: set
    `max_num_seqs` there."""
    threads: Count = 1
    """Threads that torch uses for one operation, in each replica."""
    ranks: Annotated[int, Field(ge=1, le=64, strict=True)] = 1
    """Number of processes of one replica, which compute the stage together (tensor
    parallelism). The stage's `load` gets their collectives as `context.group`."""
    device: str = Field(default="cpu", pattern=DEVICE)
    """Device of the stage's tensors: `cpu`, `cuda` (the service chooses a GPU) or
    `cuda:N`."""
    cpus: Annotated[float, Field(gt=0, le=4096, strict=True)] | None = None
    """Cores to book for each rank. By default no cores are booked, and the rank uses
    cores that are free."""
    memory_mb: Annotated[float, Field(gt=0, le=1e8, strict=True)] | None = None
    """Main memory to book for each rank, in MiB. A replica that uses more is killed,
    and an event names it. By default no memory is booked, and there is no limit. The
    memory that `generation` declares is booked in addition."""
    gpu_memory_mb: Annotated[float, Field(gt=0, le=1e8, strict=True)] | None = None
    """GPU memory to book for each rank, in MiB; torch can allocate no more than this.
    Needs a GPU as `device`. This memory also holds the keys and values of `generation`.
    """
    item_ms: Annotated[float, Field(ge=0, le=1e9, strict=True)] | None = None
    """Milliseconds that a replica takes to compute one row of a full batch. Placement
    and autoscaling use this figure; `multiworld profile` measures it."""
    out_kb: Annotated[float, Field(ge=0, le=1e9, strict=True)] | None = None
    """Size of the output that the stage sends to the next stage for one row, in KiB.
    Placement uses this figure; `multiworld profile` measures it."""
    nodes: list[Annotated[str, Field(min_length=1, max_length=253)]] = Field(
        default_factory=list
    )
    """Names of the machines that the stage may run on; any machine by default. `*`
    matches any characters, `?` one character."""

    @model_validator(mode="after")
    def _gpu_memory_on_gpu(self) -> StageSpec:
        if self.gpu_memory_mb is not None and self.device == "cpu":
            raise ValueError("gpu_memory_mb needs a GPU; add `device: cuda`")
        return self

    @model_validator(mode="after")
    def _one_number(self) -> StageSpec:
        if self.autoscaling_config is not None and self.replicas != 1:
            raise ValueError(
                "give either replicas or autoscaling_config, not both; "
                "initial_replicas sets the number at the start of autoscaling"
            )
        return self

    @property
    def initial_count(self) -> int:
        """The number of replicas at the start."""
        if (config := self.autoscaling_config) is not None:
            first = config.initial_replicas
            return config.min_replicas if first is None else first
        if isinstance(self.replicas, ReplicaRange):
            return self.replicas.min_replicas
        return self.replicas


class GenerationSpec(_Strict):
    """Settings of text generation. Names and meanings are vLLM's."""

    max_model_len: Annotated[int, Field(ge=2, le=10_000_000, strict=True)] | None = None
    """Maximum number of tokens of a sequence, prompt and output together; by default
    the model's maximum, as far as memory allows."""
    max_num_seqs: Annotated[int, Field(ge=1, le=4096, strict=True)] = 64
    """Maximum number of sequences that a replica of stage 0 generates at once; further
    sequences wait."""
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=1_000_000, strict=True)] = 256
    """Maximum number of tokens of a step. A longer prompt is computed in several steps,
    between which other sequences continue."""
    block_size: Annotated[int, Field(ge=1, le=4096, strict=True)] = 16
    """Number of tokens of a KV block, the unit of memory for keys and values."""
    kv_cache_memory_mb: Annotated[float, Field(gt=0, le=1e8, strict=True)] = 512.0
    """Memory for keys and values in each replica of a stage, in MiB."""
    backup_memory_mb: Annotated[float, Field(ge=0, le=1e8, strict=True)] = 128.0
    """Memory for the activation log of each replica, in MiB. The log has the outputs
    that the replica has sent to the next stage. A replacement in the next stage
    rebuilds its keys and values from the log; without the log, more stages must compute
    again."""
    enable_prefix_caching: bool = True
    """`true`: if a prompt starts like an earlier prompt of the same tenant, only the
    part after the common prefix is computed."""
    prefix_cache_memory_mb: Annotated[float, Field(ge=0, le=1e8, strict=True)] = 128.0
    """Memory in each replica for cached prefixes, in MiB."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Datatype to compute in; by default the datatype of the weights in the folder.
    With bfloat16 weights, the default is float32 if bfloat16 is slower on a machine of
    the service."""
    quantization: Literal["int8"] | None = None
    """`int8`: a stage quantizes its weights to one byte each when it loads, with a
    scale for each output, and sums matrix products exactly in integers. For CPUs only.
    Everything else is computed in `dtype`, by default `float32`."""
    generation_config: Literal["auto", "none"] = "auto"
    """`auto`: the defaults of temperature, top_p, top_k, min_p and repetition_penalty
    are those in the folder's `generation_config.json`. `none`: the defaults are
    OpenAI's."""
    control_tokens_in_messages: bool = False
    """`true`: control tokens such as `<|im_end|>` that clients write in messages and
    tools take effect, as in vLLM. By default they are plain text there."""
    deterministic: bool = False
    """`true`: a completion depends neither on the rest of its batch nor on lost
    replicas. It is bit-identical to the completion of an undisturbed run on the same
    kind of processor, with the same torch and the same number of threads."""
    tool_call_parser: Literal["hermes", "llama3_json"] | None = None
    """Format of tool calls in the output: `hermes` (Hermes, Qwen) or `llama3_json`. By
    default the model calls only tools that a request names or requires."""
    reasoning_marks: list[Mark] | None = None
    """The two strings that delimit the reasoning in a chat's output. Answers return the
    reasoning separately, as `reasoning`. By default the pair that starts with
    `<think>`, `[THINK]` or `<seed:think>`, if the chat template has it; `[]`: reasoning
    is part of the answer."""
    ttft_ms: Annotated[float, Field(gt=0, le=8.64e7, strict=True)] | None = None
    """Objective for the time to the first token, in milliseconds. Autoscaling works
    towards it; SLO attainment is measured against it."""
    tpot_ms: Annotated[float, Field(gt=0, le=8.64e7, strict=True)] | None = None
    """Objective for the time per output token after the first, in milliseconds, on
    average over a completion."""
    first_token_s: Seconds | None = None
    """Maximum seconds until the first token; by default 60 (600 with an `engine`). If
    `start_s` is set, the default is `start_s`, but at least 60. A request with a
    deadline (from `deadline_s`, or set in the request) has no such limit by default."""
    between_tokens_s: Seconds | None = None
    """Maximum seconds between two tokens; with the same default as `first_token_s`."""

    @field_validator("reasoning_marks")
    @classmethod
    def _two_marks(cls, marks: list[str] | None) -> list[str] | None:
        given = marks or ["<", ">"]
        has_space = any(mark != mark.strip() for mark in given)
        if len(given) != 2 or given[0] == given[1] or has_space:
            raise ValueError(
                "give two different marks, without surrounding spaces, or []"
            )
        return marks


ENGINE_START_S = 600.0
"""Default maximum seconds for the start of a replica with a whole engine."""

WITH_ENGINE = (
    "max_model_len",
    "max_num_seqs",
    "dtype",
    "generation_config",
    "control_tokens_in_messages",
    "tool_call_parser",
    "reasoning_marks",
    "ttft_ms",
    "tpot_ms",
    "first_token_s",
    "between_tokens_s",
)
"""Fields of ``generation`` that apply to a whole engine."""

OF_ENGINE_STAGE = (
    "replicas",
    "autoscaling_config",
    "spares",
    "device",
    "cpus",
    "memory_mb",
    "gpu_memory_mb",
    "compute_s",
    "nodes",
)
"""Fields of a stage that, with an ``engine``, are fields of the model itself."""

GATEWAYS = "gateway"
"""Prefix of gateway names; replica names start with the model's name instead."""

OF_BATCHES = ("max_batch_size", "max_wait_ms", "max_ongoing_requests")
"""Fields of a stage that do not apply to generated text."""

PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")
"""Arguments of an engine; their product is the number of GPUs of a replica."""

OPENAI, LLAMA_CPP, VLLM = "openai", "llama.cpp", "vllm"
"""Names of engines with special rules; ``openai``: servers that already run."""


MAX_DEPTH = 100  # levels of a value; pydantic writes at most 255


def _unlike_json(value: object, at: str, depth: int = 0) -> str | None:
    """Describe the first part of a value that JSON would change; None: no part."""
    if depth > MAX_DEPTH:
        return f"a value is nested more than {MAX_DEPTH} levels deep"
    if isinstance(value, dict):
        odd = next((key for key in value if not isinstance(key, str)), None)
        if odd is not None:
            return f"the key {odd!r}{at} is not a string; quote it"
        parts = [(f"{at} in {key!r}", part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{at} in item {n}", part) for n, part in enumerate(value)]
    elif isinstance(value, float) and not math.isfinite(value):
        return f"{value!r}{at} is not a JSON value; write it as a string"
    elif value is None or isinstance(value, str | bool | int | float):
        return None
    else:
        return f"{value!r}{at} is not a JSON value; write it as a string"
    found = (_unlike_json(part, where, depth + 1) for where, part in parts)
    return next((text for text in found if text is not None), None)


def _one_a_server(data: dict[str, Any]) -> dict[str, Any]:
    """Return the default of ``replicas``: one replica for each server's address."""
    args = data.get("engine_args")
    urls = args.get("urls") if isinstance(args, dict) else None
    return {"replicas": len(urls)} if isinstance(urls, list) and urls else {}


class ModelSpec(_Strict):
    """One model."""

    version: str = Field(default="1", pattern=VERSION)
    """Version of the model. If it changes, `multiworld update` performs a rolling
    update from the running version to the new one, without a pause."""
    factory: str | None = Field(default=None, pattern=FACTORY)
    """`package.module:function` that returns a multiworld.serve.Model, a list of
    stages, or a multiworld.serve.Module to cut."""
    path: str | None = None
    """Folder of a Hugging Face model on disk, or name of a model on the hub
    (`OWNER/NAME`), which is fetched once. The model is cut between layers."""
    revision: str | None = Field(default=None, pattern=REVISION)
    """Commit, tag or branch; required for a model on the hub. A commit is best, because
    replicas that start later then load the same weights."""
    generation: GenerationSpec | None = None
    """Makes the model generate text, served by the chat and completion routes of the
    OpenAI API. `generation: {}` uses all defaults. A model at `path` must then be a
    decoder."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the factory."""
    engine: str | None = Field(default=None, pattern=ENGINE)
    """External engine that computes the whole model in each replica: `vllm`,
    `llama.cpp`, `openai` (existing servers with OpenAI's API), or
    `package.module:function` of an adapter. Such a model has no `stages`: `replicas`,
    `autoscaling_config`, `device`, `cpus`, `memory_mb`, `gpu_memory_mb`, `compute_s`
    and `nodes` are fields of the model itself."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the engine, by the engine's names: `tensor_parallel_size: 2` becomes
    `--tensor-parallel-size 2`. Not for settings that have a field in this spec.
    With `openai`: `urls`, `model`, `api_key_env` and `health`."""
    adapters: dict[Annotated[str, Field(pattern=NAME)], str] = Field(
        default_factory=dict
    )
    """With an `engine`: LoRA adapters of the model, by name. The same replicas serve
    each adapter as a model of that name. Values are folders (`vllm`), GGUF files
    (`llama.cpp`), or names at the servers (`openai`)."""
    embeddings: bool = False
    """With `engine: vllm`, `llama.cpp` or `openai`: the engine embeds texts, for
    `/v1/embeddings`, and generates no text. All arguments of the engine are in
    `engine_args`."""
    exact: bool = True
    """With `engine: openai`: after a loss, a stream continues with the tokens of an
    undisturbed stream, so the servers must return token ids. `false` also allows
    servers that return only text, and sends each stream as one request; tokens after a
    loss are then sampled anew."""
    engine_python: str | None = None
    """Python interpreter of the environment that the engine is installed in; by
    default the interpreter of the service."""
    replicas: Count | ReplicaRange | None = None
    """With an `engine`: number of replicas, or a range; see `replicas` of a stage."""
    autoscaling_config: AutoscalingConfig | None = None
    """With an `engine`: autoscaling, in place of `replicas`."""
    spares: int | None = None
    """With an `engine`: number of replicas with loaded engines that wait to take over;
    see `spares` of a stage."""
    device: str | None = Field(default=None, pattern=DEVICE)
    """With an `engine`: `cpu`, `cuda` (the service chooses GPUs) or `cuda:N`. The
    number of GPUs of a replica is `tensor_parallel_size` times `pipeline_parallel_size`
    (in `engine_args`); the engine sees only these GPUs."""
    cpus: Annotated[float, Field(gt=0, le=4096, strict=True)] | None = None
    """With an `engine`: cores to book for a replica. The engine runs on this many whole
    cores, which no other engine of the same user on the machine uses."""
    memory_mb: Annotated[float, Field(gt=0, le=1e8, strict=True)] | None = None
    """With an `engine`: main memory to book for a replica, all processes of the engine
    together, in MiB. A replica that uses more is killed."""
    gpu_memory_mb: Annotated[float, Field(gt=0, le=1e8, strict=True)] | None = None
    """With an `engine`: GPU memory to book on each GPU of a replica, in MiB. vLLM uses
    no more than this, plus CUDA's context. By default a replica has its GPUs to
    itself."""
    compute_s: Seconds | None = None
    """With an `engine`: seconds without any token, while sequences run, after which the
    engine counts as hung and the replica is replaced; 30 by default. With `embeddings`:
    seconds for one batch; 60 by default."""
    nodes: list[Annotated[str, Field(min_length=1, max_length=253)]] | None = None
    """With an `engine`: names of the machines that replicas may run on."""
    start_s: Seconds | None = None
    """Maximum seconds for a replica to become ready, for a model that takes long to
    load; by default the service's `ready_s`, and 600 with an `engine`."""
    stages: Annotated[list[StageSpec], Field(min_length=1, max_length=64)]
    """The stages in order: those that the factory returns, or those into which the
    model at `path` is cut. Required without an `engine`, and refused with one."""
    cut: list[Annotated[int, Field(ge=1, strict=True)]] | None = None
    """For each stage but the first: number of its first layer (with a `path`) or first
    part (of a Module). `multiworld partition` proposes these numbers. By default the
    model is cut into stages of about equal cost."""
    deadline_s: Seconds | None = None
    """Deadline of a request that does not set its own, in seconds; 30 by default.
    Generated text has no default, because a completion may be long. A completion that
    reaches its deadline returns the tokens so far, with `finish_reason: "length"`."""
    max_queued_requests: Annotated[int, Field(ge=0, le=1_000_000, strict=True)] = 512
    """Maximum number of requests that wait at one gateway; a stream counts as waiting
    until its first token. Further requests are answered with 429."""
    identity: SkipJsonSchema[Identity | None] = None
    """Identity of the version, set by the service; not a field of a spec."""
    profile: str | None = None
    """File written by `multiworld profile`, relative to the spec. It supplies
    `memory_mb`, `item_ms` and `out_kb` where a stage does not declare them."""
    demand: Annotated[float, Field(gt=0, le=1e9, strict=True)] | None = None
    """Rows per second to plan the placement for. The number of replicas still follows
    `replicas`; only `multiworld plan` proposes a number, within the range. By default
    placement plans for the replicas alone."""
    weight: Annotated[float, Field(gt=0, le=1e6, strict=True)] = 1.0
    """Weight of this model relative to the others if not all demand can be met."""
    dedicated: list[Annotated[str, Field(pattern=NAME)]] = Field(default_factory=list)
    """Tenants that get their own replicas of this model, as many as the stages declare.
    Each tenant's copy is a separate model, named `NAME@TENANT`."""
    objective_ms: Annotated[float, Field(gt=0, le=8.64e7, strict=True)] | None = None
    """Latency objective: milliseconds within which an answer should come, queueing
    included. Autoscaling works towards it; SLO attainment is measured against it. For
    generated text, see `ttft_ms` and `tpot_ms`."""
    objective_share: Annotated[float, Field(ge=0.5, lt=1, strict=True)] = 0.99
    """Share of answers that should meet `objective_ms`. A lower share needs a smaller
    burst reserve."""
    scaling: str | None = Field(default=None, pattern=FACTORY)
    """`package.module:function` that decides the number of replicas of each stage, in
    place of `default_policy:decide` (generated text: `token_policy:decide`) of
    `multiworld.serve.controller.scaling`."""
    latency_ms: Annotated[float, Field(gt=0, le=1e9, strict=True)] | None = None
    """Maximum milliseconds that a row may take through all stages, without queueing: a
    constraint on the placement."""

    @property
    def engine_gpus(self) -> int:
        """Number of GPUs that a replica takes on machines with GPUs."""
        return math.prod(self.engine_args.get(name, 1) for name in PARALLEL_SIZES)

    @model_validator(mode="before")
    @classmethod
    def _engine_stage(cls, data: Any) -> Any:
        """Move the stage fields of a model with an engine into its only stage."""
        if not isinstance(data, dict) or data.get("engine") is None:
            return data
        own = {n: data[n] for n in OF_ENGINE_STAGE if data.get(n) is not None}
        scaled = own.keys() & {"replicas", "autoscaling_config"}
        counted = {} if scaled or data["engine"] != OPENAI else _one_a_server(data)
        stages = data.get("stages", [{**own, **counted}])
        # A dumped spec already has the one stage that this function adds.
        is_dumped = not own and isinstance(stages, list) and len(stages) == 1
        if "stages" in data and not is_dumped:
            raise ValueError(
                "a model with an engine has no stages; write replicas and the "
                "other fields of a stage at the model"
            )
        rest = {name: data[name] for name in data if name not in OF_ENGINE_STAGE}
        generation, start_s = rest.get("generation"), rest.get("start_s")
        if generation is None and not rest.get("embeddings"):
            generation = {}
        return {
            **rest,
            "generation": generation,
            "stages": stages,
            "start_s": ENGINE_START_S if start_s is None else start_s,
        }

    @field_validator("version", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        # YAML reads an unquoted 2 as an integer, which is unambiguous as a version.
        if isinstance(value, float):
            raise ValueError(f'quote it: version: "{value}" (1.10 would become 1.1)')
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return str(value) if is_number else value

    @field_validator("options", "engine_args")
    @classmethod
    def _sent_as_given(cls, value: dict[str, Any]) -> dict[str, Any]:
        # Replicas get these values as JSON, which would silently change values of other
        # types.
        if (found := _unlike_json(value, "")) is not None:
            raise ValueError(found)
        return value

    @field_validator("stages")
    @classmethod
    def _distinct(cls, stages: list[StageSpec]) -> list[StageSpec]:
        names = [stage.name or str(number) for number, stage in enumerate(stages)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two stages are called {twice[0]!r}; rename one")
        return stages

    @model_validator(mode="after")
    def _scaled(self) -> ModelSpec:
        if self.generation is not None and self.objective_ms is not None:
            raise ValueError(
                "objective_ms has no effect on generated text; see ttft_ms and tpot_ms "
                "of generation"
            )
        if self.scaling is not None and not any(
            stage.autoscaling_config for stage in self.stages
        ):
            raise ValueError(
                "scaling has no effect without an autoscaling_config; add one to a "
                "stage, or remove scaling"
            )
        return self

    @model_validator(mode="after")
    def _stages_of_text(self) -> ModelSpec:
        for stage in self.stages if self.generation is not None else ():
            if stage.ranks > 1:
                raise ValueError(
                    "a model that generates text has one rank in each stage; remove "
                    "ranks"
                )
            if stage.device != "cpu" and self.engine is None:
                self._check_on_gpu()
            for name in OF_BATCHES:
                if getattr(stage, name) != StageSpec.model_fields[name].default:
                    raise ValueError(
                        f"{name} has no effect on generated text; see max_num_seqs and "
                        "max_num_batched_tokens of generation"
                    )
        return self

    def _check_on_gpu(self) -> None:
        """Refuse options that the built-in engine supports on CPUs only."""
        assert self.generation is not None
        for name in ("deterministic", "quantization"):
            if getattr(self.generation, name):
                raise ValueError(
                    f"generation: {name} is for CPUs only; remove it, or `device`"
                )

    def _check_engine_gpus(self) -> None:
        """Refuse arguments that make a replica's GPUs or their memory ambiguous."""
        for name in PARALLEL_SIZES:
            if name.replace("_", "-") in self.engine_args:
                raise ValueError(f"engine_args: write {name} with underscores")
            size = self.engine_args.get(name, 1)
            if type(size) is not int or not 1 <= size <= 1024:
                raise ValueError(
                    f"engine_args: {name} must be an integer from 1 to 1024, not "
                    f"{size!r}"
                )
        names = {name.replace("-", "_") for name in self.engine_args}
        if "gpu_memory_utilization" in names and self.stages[0].gpu_memory_mb:
            raise ValueError(
                "gpu_memory_mb and engine_args: gpu_memory_utilization set the same "
                "limit; remove one"
            )
        device = self.stages[0].device
        if self.engine_gpus > 1 and ":" in device:
            raise ValueError(
                f"engine_args give a replica {self.engine_gpus} GPUs, but device: "
                f"{device} names only one; write device: cuda"
            )

    def _check_embeddings(self) -> None:
        """Refuse engines that cannot embed, and fields without effect on embeddings."""
        if self.engine not in (VLLM, LLAMA_CPP, OPENAI):
            known = f"{VLLM}, {LLAMA_CPP} or {OPENAI}"
            raise ValueError(f"embeddings: true needs engine: {known}")
        if not self.exact:
            raise ValueError("exact: false has no effect on embeddings; remove it")
        if self.generation is not None or self.adapters:
            raise ValueError(
                "embeddings: true generates no text; remove generation and adapters"
            )

    @model_validator(mode="after")
    def _one_engine(self) -> ModelSpec:
        if self.engine is None:
            own = ("engine_args", "engine_python", "adapters", "embeddings")
            fields = (*own, *OF_ENGINE_STAGE)
            for name in fields:
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is for models with an engine; add an engine, or move "
                        "it to a stage if stages have this field"
                    )
            if not self.exact:
                raise ValueError(
                    "exact: false has an effect only with engine: openai; remove exact"
                )
            return self
        self._check_engine_gpus()
        if self.engine == OPENAI and self.engine_python is not None:
            raise ValueError("engine: openai starts no server; remove engine_python")
        if not self.exact and self.engine != OPENAI:
            raise ValueError(
                "exact: false has an effect only with engine: openai; remove exact"
            )
        if self.path is None or self.options or self.cut or self.profile:
            raise ValueError(
                "a model with an engine needs a path, and has no factory, "
                "options, cut or profile"
            )
        if self.embeddings:
            self._check_embeddings()
            return self
        given, default = self.generation or GenerationSpec(), GenerationSpec()
        if self.engine == LLAMA_CPP and given.max_model_len is None:
            raise ValueError(
                "llama.cpp needs generation: max_model_len; each of the max_num_seqs "
                "sequences gets memory for this many tokens"
            )
        for name in type(default).model_fields:
            is_set = getattr(given, name) != getattr(default, name)
            if is_set and name not in WITH_ENGINE:
                raise ValueError(
                    f"generation: {name} has no effect on an engine; remove it, or use "
                    "the engine's own argument in engine_args"
                )
        return self

    @model_validator(mode="after")
    def _one_source(self) -> ModelSpec:
        if (self.factory is None) == (self.path is None):
            raise ValueError("give either factory or path, and not both")
        if self.path is None and self.revision is not None:
            raise ValueError("revision is only for a path on the hub; remove it")
        return self


class GatewaySpec(_Strict):
    """The HTTP gateway."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535, strict=True)] = 8000
    """Port to listen on; 0 picks a free one."""
    replicas: Annotated[int, Field(ge=1, le=64, strict=True)] = 1
    """Number of gateway processes; they share the port."""
    authentication: Literal["none", "keys"] = "none"
    """`keys`: every request needs the API key of a tenant (`multiworld tenants`)."""
    max_body_mb: Annotated[float, Field(gt=0, le=4096, strict=True)] = 64.0
    """Maximum size of a request body with binary tensors, in MiB; a larger one is
    answered with 413."""
    max_json_mb: Annotated[float, Field(gt=0, le=4096, strict=True)] = 8.0
    """Maximum size of JSON in a request body, decompressed, in MiB; a larger one is
    answered with 413. Parsing blocks the whole gateway for up to 5 ms per MiB."""
    max_bodies_mb: Annotated[float, Field(gt=0, le=1_048_576, strict=True)] = 512.0
    """Maximum size of the bodies of all requests in flight in a gateway, in MiB; beyond
    it, requests are answered with 503. One tenant may use half of it."""
    max_connections: Annotated[int, Field(ge=1, le=1_000_000, strict=True)] = 4096
    """Maximum number of connections to a gateway; further connections are answered with
    503, or, while other connections are in their TLS handshakes, closed."""
    head_s: Seconds = 10.0
    """Maximum seconds for a client to send the headers of a request; a slower request
    is answered with 408. A connection whose TLS handshake takes longer is closed."""
    keep_alive_s: Seconds = 30.0
    """Seconds until an idle connection is closed, rounded up. Set this higher than
    the idle timeout of a proxy in front of the gateway; otherwise the proxy may send
    requests on connections that are being closed."""
    shutdown_s: Seconds = 30.0
    """Seconds that accepted requests have to finish when the service shuts down."""
    detach_s: Annotated[float, Field(ge=0, le=86400)] = 0.0
    """Seconds for which a stream continues, and can be read again at
    `/v1/streams/{id}`, after its client has disconnected. Requests may set their own
    `detach_s`. 0: a stream ends when its client disconnects."""
    max_detach_s: Annotated[float, Field(ge=0, le=86400)] = 600.0
    """Maximum `detach_s` of a request; 0: requests cannot set it."""
    detached_mb: Annotated[float, Field(gt=0, le=1_048_576, strict=True)] = 64.0
    """Maximum size of the events that a gateway keeps for clients to read again, in
    MiB. One tenant may use half of it. Beyond it, complete streams are dropped first;
    then streams without a client are cancelled."""
    access_log: bool = False
    """`true`: log a line for every inference request: its id (header `X-Request-Id`),
    tenant, method, path, status and seconds."""
    strict: bool = False
    """`true`: requests with unknown fields are refused. By default an unknown field is
    refused only if it would change the answer or seems misspelt. Otherwise it is
    ignored, named in the header `X-Ignored-Fields` of the response, and logged."""
    cors_origins: list[Annotated[str, Field(pattern=ORIGIN)]] = Field(
        default_factory=list
    )
    """Origins whose pages may use the API from a browser, such as
    `https://chat.example.com`; `*`: any."""
    keeper: bool = True
    """`true`: a stream keeper holds the clients' connections, so that other gateways
    continue them if a gateway is lost. Not with `tls_certificate`: instead, terminate
    TLS in a proxy in front of the gateway."""
    spare: bool = True
    """`true`: with `keeper`, and if a model generates text, run one gateway more than
    `replicas`, so that the streams of a lost gateway need not wait until another
    gateway has started."""
    keeper_memory_mb: Annotated[int, Field(ge=1, le=1_048_576, strict=True)] = 128
    """Maximum size of the keeper's records of requests and answers, in MiB; beyond it,
    streams are unprotected."""
    handover_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """With `keeper`: seconds for which connections wait for the next service when this
    service shuts down. If a service with the same state folder starts in this time, it
    continues the answers; clients that connect in the meantime wait, too. 0: the
    service completes all answers before it exits, within `shutdown_s`."""
    tls_certificate: str | None = None
    """PEM file with the certificate chain; turns on HTTPS. Needs `tls_key`."""
    tls_key: str | None = None
    """PEM file with the private key of the certificate."""

    @property
    def is_kept(self) -> bool:
        """Whether a stream keeper holds the connections."""
        return self.keeper and self.tls_certificate is None

    @model_validator(mode="after")
    def _both(self) -> GatewaySpec:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("give tls_certificate and tls_key together, or neither")
        return self


class MachineSpec(_Strict):
    """Resources of this machine that replicas may book."""

    name: str = Field(default="", max_length=253)
    """Name of this machine in `nodes`; the host name by default."""
    cpus: Annotated[float, Field(gt=0, le=1e6, strict=True)] | None = None
    """Number of cores; all by default."""
    memory_mb: Annotated[float, Field(gt=0, le=1e9, strict=True)] | None = None
    """Main memory, in MiB; all by default."""


class RaySpec(_Strict):
    """A Ray cluster, on which every replica is an actor in a placement group."""

    address: str = "auto"
    """`auto`: the cluster that this machine belongs to; `local`: a cluster that starts
    on this machine and stops with the service; or HOST:PORT of the head node."""
    namespace: str = Field(default="multiworld", min_length=1, max_length=64)
    """Ray namespace of the actors."""


class AppSpec(_Strict):
    """A service: its models, its gateway, and where its replicas run."""

    app: str = Field(default="app", pattern=NAME)
    """Name of the service; commands find the service by this name."""
    models: Annotated[dict[str, ModelSpec], Field(min_length=1)]
    """Models by name. `NAME@TENANT` is the copy for one tenant (see `dedicated`)."""
    gateway: GatewaySpec = GatewaySpec()
    """HTTP: address, limits and TLS."""
    launcher: str = Field(default="local", pattern=LAUNCHER)
    """Launcher of the replicas: `local` (this machine), `ray` (nodes of a Ray cluster),
    or `package.module:function` that makes another launcher."""
    ray: RaySpec | None = None
    """The Ray cluster; needs `launcher: ray`."""
    machine: MachineSpec = MachineSpec()
    """Resources of this machine that replicas may book, with `launcher: local`."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address of this machine at which replicas reach the store. Replicas on other
    machines must be able to reach it. `auto`: the address from which this machine
    reaches other networks."""
    placement: str | None = Field(default=None, pattern=FACTORY)
    """`package.module:function` that chooses the machine for the next replica, in place
    of `multiworld.serve.machines.assignment:assign`."""
    silence_s: Patience = 2.0
    """Seconds of silence after which a process counts as lost and is replaced."""
    ready_s: Patience = 120.0
    """Maximum seconds for a process to become ready; after that it is replaced. A new
    version is rolled back if no replica of it becomes ready within this time."""
    drain_s: Seconds = 60.0
    """Maximum seconds for a draining process to finish its work before it is killed."""
    orphan_s: Seconds = 10.0
    """Seconds after which a worker exits if it has neither a controller nor a
    gateway."""

    @property
    def gateways(self) -> int:
        """Number of gateways that run, including the spare one."""
        generates = any(model.generation is not None for model in self.models.values())
        is_spare = self.gateway.spare and self.gateway.is_kept and generates
        return self.gateway.replicas + is_spare

    @model_validator(mode="after")
    def _ray(self) -> AppSpec:
        if self.ray is not None and self.launcher != "ray":
            raise ValueError(
                "`ray` is for the Ray launcher; add `launcher: ray`, or remove `ray`"
            )
        return self

    @field_validator("models")
    @classmethod
    def _names(cls, models: dict[str, ModelSpec]) -> dict[str, ModelSpec]:
        for name in models:
            base, mark, tenant = name.partition("@")
            parts = (base, tenant) if mark else (base,)
            if not all(re.fullmatch(NAME, part) for part in parts):
                raise ValueError(f"model name {name!r}: {PATTERNS[NAME]}")
            if base == GATEWAYS:
                raise ValueError(
                    f"model name {name!r}: the name is reserved for gateways; rename "
                    "the model"
                )
            if mark and base not in models:
                raise ValueError(
                    f"model name {name!r}: there is no model {base!r}; write the name "
                    "of a model before the @"
                )
            if mark and models[name].dedicated:
                raise ValueError(
                    f"model {name!r} serves one tenant; write `dedicated` at {base!r}"
                )
        shared = {name: spec for name, spec in models.items() if "@" not in name}
        names = [*shared, *(a for spec in shared.values() for a in spec.adapters)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"two models or adapters are called {twice[0]!r}; rename one"
            )
        return models
