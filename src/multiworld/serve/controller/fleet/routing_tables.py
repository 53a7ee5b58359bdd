"""The routing table, computed from the state of the fleet. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from multiworld.serve.controller.fleet.state import (
    STATE_OF,
    DesiredModel,
    DesiredState,
    Process,
)
from multiworld.serve.wire.routing_table import Replica, Route, RoutingTable

# Desired state of all versions that are desired or still run, by model and version.
Versions = Mapping[tuple[str, str], DesiredModel]


def routing_table_of(
    number: int,
    processes: Collection[Process],
    desired: DesiredState,
    active: Mapping[str, str],
    versions: Versions,
    refused: Collection[tuple[str, str]] = (),  # versions whose files have changed
) -> RoutingTable:
    gateways = (p.name for p in processes if p.is_gateway and p.is_there)
    return RoutingTable(
        number=number,
        gateways=tuple(sorted(gateways)),
        routes={
            name: _route(name, active[name], model, versions, refused)
            for name, model in desired.models.items()
        },
        replicas={
            p.name: Replica(
                p.name,
                p.model,
                p.version,
                p.stage,
                STATE_OF[p.phase],
                p.fingerprint,
                p.weights,
                _stages(versions.get((p.model, p.version))),
                p.noise,
            )
            for p in processes
            if not p.is_gateway and p.is_there
        },
    )


def _stages(known: DesiredModel | None) -> int:
    return len(known.replicas) if known is not None and known.generates else 0


def _route(
    name: str,
    active: str,
    desired: DesiredModel,
    versions: Versions,
    refused: Collection[tuple[str, str]],
) -> Route:
    model = versions.get((name, active), desired)
    return Route(
        version=active,
        stages={
            version: len(known.replicas)
            for (other, version), known in versions.items()
            if other == name
        },
        max_queued_requests=model.max_queued_requests,
        max_ongoing_requests=model.max_ongoing_requests,
        deadline_s=model.deadline_s,
        objective_s=model.objective_s,
        on_demand=model.on_demand,
        generates=model.generates,
        ttft_s=model.ttft_s,
        tpot_s=model.tpot_s,
        is_refused=(name, active) in refused,
        has_deadline=model.has_deadline,
    )
