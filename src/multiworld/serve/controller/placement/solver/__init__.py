"""Placement solver: ``place`` solves a ``Problem`` with a ``Placement`` in which
``verify.faults`` finds no fault. Only the time limit reads a clock."""

from multiworld.serve.controller.placement.solver.portfolio import place
from multiworld.serve.controller.placement.solver.problem import (
    Device,
    ModelNeed,
    Node,
    Placement,
    Problem,
    Replica,
    StageNeed,
)

__all__ = [
    "Device",
    "ModelNeed",
    "Node",
    "Placement",
    "Problem",
    "Replica",
    "StageNeed",
    "place",
]
