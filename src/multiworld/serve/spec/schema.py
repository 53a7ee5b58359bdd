"""What a YAML spec may say. Every field has a meaning, a unit and a default."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

NAME = r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$"
VERSION = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
FACTORY = r"^[\w.]+:\w+$"
DEVICE = r"^(cpu|cuda(:\d+)?)$"
PATTERNS = {
    NAME: "use lower-case letters, digits, '.', '_' and '-', at most 64",
    VERSION: "use letters, digits, '.', '_' and '-', at most 63",
    FACTORY: "write package.module:function",
    DEVICE: "write cpu, cuda or cuda:N",
}
"""What to do about a text that does not match."""

Seconds = Annotated[float, Field(gt=0, le=86400, strict=True)]
Count = Annotated[int, Field(ge=1, le=4096, strict=True)]


class _Strict(BaseModel):
    """Unknown keys are errors; a value of the wrong type is not guessed at."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True
    )


class ReplicaRange(_Strict):
    """A range within which `multiworld scale` moves a stage."""

    min_replicas: Count = 1
    """Fewest."""
    max_replicas: Count
    """Most."""

    @model_validator(mode="after")
    def _ordered(self) -> ReplicaRange:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is more than max_replicas; swap them")
        return self


class AutoscalingConfig(_Strict):
    """How a stage is scaled by itself; names and meanings are Ray Serve's."""

    min_replicas: Annotated[int, Field(ge=0, le=4096, strict=True)] = 1
    """Fewest. 0: none runs while nobody asks; the first request then waits for a
    start."""
    max_replicas: Count
    """Most."""
    initial_replicas: Annotated[int, Field(ge=0, le=4096, strict=True)] | None = None
    """How many to begin with; `min_replicas` by default."""
    target_ongoing_requests: Annotated[float, Field(gt=0, le=1e6)] = 2.0
    """Requests that are queued for or computed by a replica, on average, when there are
    as many as there should be. With `objective_ms` the objective counts instead."""
    upscale_delay_s: Annotated[float, Field(ge=0, le=86400)] = 30.0
    """Seconds for which more must be needed before more are started. Not waited for
    where none runs, or where what waits already misses the objective."""
    downscale_delay_s: Annotated[float, Field(ge=0, le=86400)] = 600.0
    """Seconds for which fewer must do before some are drained."""
    downscale_to_zero_delay_s: Annotated[float, Field(ge=0, le=86400)] | None = None
    """The same for the last one; `downscale_delay_s` by default."""
    look_back_period_s: Seconds = 30.0
    """Seconds over which what arrives is averaged."""
    upscaling_factor: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Of the replicas that are missing, how many are started at a time."""
    downscaling_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of those that are too many, how many are drained at a time."""
    metrics_interval_s: Annotated[float, Field(ge=0.1, le=86400)] = 1.0
    """Seconds between two decisions; of a model, the least of its stages'. (Ray Serve's
    default is 10.)"""

    @model_validator(mode="after")
    def _ordered(self) -> AutoscalingConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is more than max_replicas; swap them")
        first = self.initial_replicas
        if first is not None and not self.min_replicas <= first <= self.max_replicas:
            raise ValueError(
                f"initial_replicas must be from {self.min_replicas} to "
                f"{self.max_replicas}, as min_replicas and max_replicas say"
            )
        return self


class StageSpec(_Strict):
    """One stage of a model."""

    name: str = Field(default="", max_length=64)
    """For people; the model's own name of the stage by default."""
    replicas: Count | ReplicaRange = 1
    """How many copies run: a number, or a range that starts with its least, within
    which `multiworld scale` moves it."""
    autoscaling_config: AutoscalingConfig | None = None
    """Instead of `replicas`: the load decides how many run."""
    max_batch_size: Count = 16
    """Most rows that are computed together."""
    max_wait_ms: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    """Milliseconds that the oldest request waits for company. 0: a batch is what has
    arrived while the one before it was computed."""
    compute_s: Seconds | None = None
    """Seconds that one batch may be computed for; a replica that takes longer is ended
    and replaced. By default one is ended that computes for half a minute, and ten
    seconds after the last deadline of its requests."""
    max_ongoing_requests: Count = 32
    """Most requests that a sender may have at a replica and not begun."""
    threads: Count = 1
    """Threads that torch uses for one operation, in each replica."""
    ranks: Annotated[int, Field(ge=1, le=64, strict=True)] = 1
    """Processes that one replica consists of, for stages that compute together
    (tensor-parallel ones); the stage's `load` gets them as `context.group`."""
    device: str = Field(default="cpu", pattern=DEVICE)
    """Where its tensors are: `cpu`, `cuda` (a GPU is chosen) or `cuda:N`."""
    cpus: Annotated[float, Field(gt=0, le=4096)] | None = None
    """Cores that are booked for each rank. By default none: it takes what is free."""
    memory_mb: Annotated[float, Field(gt=0, le=1e8)] | None = None
    """Main memory that is booked for each rank, in MiB; a replica that uses more is
    ended, and named. By default none is booked, and nothing limits it."""
    gpu_memory_mb: Annotated[float, Field(gt=0, le=1e8)] | None = None
    """The same for memory of its GPU."""
    item_ms: Annotated[float, Field(ge=0)] | None = None
    """Milliseconds that a replica computes for one row of a full batch; a placement is
    planned with it. `multiworld profile` measures it."""
    out_kb: Annotated[float, Field(ge=0)] | None = None
    """What it hands to the next stage for a row, in KiB; planned with, too."""
    nodes: list[Annotated[str, Field(min_length=1, max_length=253)]] = Field(
        default_factory=list
    )
    """The machines that it may run on, by name (`*` and `?` stand for any characters);
    by default any."""

    @model_validator(mode="after")
    def _gpu_memory_on_gpu(self) -> StageSpec:
        if self.gpu_memory_mb is not None and self.device == "cpu":
            raise ValueError("gpu_memory_mb is for a GPU; add `device: cuda`")
        return self

    @model_validator(mode="after")
    def _one_number(self) -> StageSpec:
        if self.autoscaling_config is not None and self.replicas != 1:
            raise ValueError(
                "give replicas or autoscaling_config, not both; initial_replicas says "
                "how many to begin with"
            )
        return self

    @property
    def initial_count(self) -> int:
        """How many replicas to begin with."""
        if (config := self.autoscaling_config) is not None:
            first = config.initial_replicas
            return config.min_replicas if first is None else first
        if isinstance(self.replicas, ReplicaRange):
            return self.replicas.min_replicas
        return self.replicas


class ModelSpec(_Strict):
    """One model."""

    version: str = Field(default="1", pattern=VERSION)
    """A new one makes `multiworld update` replace the running one without a pause."""
    factory: str | None = Field(default=None, pattern=FACTORY)
    """`package.module:function` that returns a multiworld.serve.Model, a list of
    stages, or a multiworld.serve.Module to be cut."""
    path: str | None = None
    """A Hugging Face model folder on disk; it is cut by layers."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    stages: Annotated[list[StageSpec], Field(min_length=1, max_length=64)]
    """In order; as many as the factory returns."""
    cut: list[Annotated[int, Field(ge=1, strict=True)]] | None = None
    """Where a `path` or a Module is cut: the first layer or part of every stage after
    the first, as `multiworld partition` proposes. By default stages are about equal."""
    deadline_s: Seconds = 30.0
    """Seconds that a request may take if it names no deadline itself."""
    max_queued_requests: Annotated[int, Field(ge=0, le=1_000_000)] = 512
    """Most requests that wait at a gateway; more are answered with 429."""
    profile: str | None = None
    """A file that `multiworld profile` has written, relative to the spec: what its
    stages need where they do not declare it."""
    demand: Annotated[float, Field(gt=0)] | None = None
    """Rows a second that a placement is planned for; how many replicas a stage has is
    still what `replicas` says, within its range. By default just the replicas."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """What its demand counts beside that of others, where not all of it can be met."""
    dedicated: list[Annotated[str, Field(pattern=NAME)]] = Field(default_factory=list)
    """Tenants that have replicas of this model for themselves, as many as the stages
    say; it is served to each of them as `NAME@TENANT`, a model of its own."""
    objective_ms: Annotated[float, Field(gt=0, le=8.64e7)] | None = None
    """Milliseconds within which answers should come, waiting included: what scaling
    works towards, and what attainment is counted by."""
    objective_share: Annotated[float, Field(ge=0.5, lt=1)] = 0.99
    """Of the answers, that should: with fewer, fewer replicas are kept for bursts."""
    scaling: str | None = Field(default=None, pattern=FACTORY)
    """`package.module:function` that decides how many replicas its stages have, in
    place of `multiworld.serve.scaling.default_policy:decide`."""
    latency_ms: Annotated[float, Field(gt=0)] | None = None
    """Milliseconds that a row may take through all stages, without waiting, as it is
    planned."""

    @field_validator("version", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        # YAML reads an unquoted 2 as a number, and means it.
        if isinstance(value, float):
            raise ValueError(f'quote it: version: "{value}" (1.10 would become 1.1)')
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return str(value) if is_number else value

    @field_validator("stages")
    @classmethod
    def _distinct(cls, stages: list[StageSpec]) -> list[StageSpec]:
        names = [stage.name or str(number) for number, stage in enumerate(stages)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two stages are called {twice[0]!r}; rename one")
        return stages

    @model_validator(mode="after")
    def _one_source(self) -> ModelSpec:
        if (self.factory is None) == (self.path is None):
            raise ValueError("give either factory or path, not both and not neither")
        return self


class GatewaySpec(_Strict):
    """The HTTP side."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 takes a free one."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that share the port."""
    authentication: Literal["none", "keys"] = "none"
    """`keys`: every request needs the API key of a tenant (`multiworld tenants`)."""
    max_body_mb: Annotated[float, Field(gt=0, le=4096)] = 64.0
    """Largest request body, in MiB; a larger one is answered with 413."""
    max_connections: Annotated[int, Field(ge=1, le=1_000_000, strict=True)] = 4096
    """Most connections of a gateway at a time; one more is answered with 503."""
    head_s: Seconds = 10.0
    """Seconds that a client may take to send a request's headers; then 408."""
    shutdown_s: Seconds = 30.0
    """Seconds that accepted requests get to end at a shutdown."""
    tls_certificate: str | None = None
    """PEM file with the certificate chain: HTTPS. With tls_key."""
    tls_key: str | None = None
    """PEM file with the key of the certificate."""

    @model_validator(mode="after")
    def _both(self) -> GatewaySpec:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("give tls_certificate and tls_key together")
        return self


class MachineSpec(_Strict):
    """What may be booked of this machine; what is not declared is not booked."""

    name: str = Field(default="", max_length=253)
    """What `nodes:` calls it; the host's name by default."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    """Cores; all by default."""
    memory_mb: Annotated[float, Field(gt=0)] | None = None
    """Main memory, in MiB; all by default."""


class RaySpec(_Strict):
    """A Ray cluster, on which every replica is an actor in a placement group."""

    address: str = "auto"
    """`auto`: the cluster that this machine is part of; `local`: one that is started on
    this machine, and ends with the service; or HOST:PORT of the head."""
    namespace: str = Field(default="multiworld", min_length=1, max_length=64)
    """The Ray namespace of the actors."""


class AppSpec(_Strict):
    """A service: models, and how they are reached."""

    app: str = Field(default="app", pattern=NAME)
    """Name of the service; the commands find it by this."""
    models: Annotated[dict[str, ModelSpec], Field(min_length=1)]
    """By name. `NAME@TENANT`: the same for this tenant only, see `dedicated`."""
    gateway: GatewaySpec = GatewaySpec()
    """The HTTP side."""
    launcher: Literal["local", "ray"] = "local"
    """Where replicas run: on this machine, or on the machines of a Ray cluster."""
    ray: RaySpec | None = None
    """The Ray cluster, with `launcher: ray`."""
    machine: MachineSpec = MachineSpec()
    """What replicas may book of this machine, with `launcher: local`."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """The address of this machine at which its replicas reach the store; one that other
    machines know if replicas run there. `auto`: that of its way out."""
    placement: str | None = Field(default=None, pattern=FACTORY)
    """`package.module:function` that chooses the machine of the next replica, in place
    of `multiworld.serve.resources.assignment:assign`."""
    silence_s: Seconds = 2.0
    """Seconds of silence after which a process is given up and replaced."""
    ready_s: Seconds = 120.0
    """Seconds that a new version gets to become ready before it is rolled back."""
    drain_s: Seconds = 60.0
    """Seconds that a replica gets to end its work before it is stopped."""
    orphan_s: Seconds = 10.0
    """Seconds after which a worker with neither controller nor gateway ends itself."""

    @model_validator(mode="after")
    def _ray(self) -> AppSpec:
        if self.ray is not None and self.launcher != "ray":
            raise ValueError("ray: says how; add `launcher: ray`, or remove it")
        return self

    @field_validator("models")
    @classmethod
    def _names(cls, models: dict[str, ModelSpec]) -> dict[str, ModelSpec]:
        for name in models:
            base, mark, tenant = name.partition("@")
            if not re.match(NAME, base) or (mark and not re.match(NAME, tenant)):
                raise ValueError(f"model name {name!r}: {PATTERNS[NAME]}")
            if mark and base not in models:
                raise ValueError(
                    f"model name {name!r}: what stands before the @ is a model, and "
                    f"there is no {base!r}"
                )
        return models
