"""Placement solver: a problem, a portfolio of solvers, and a verifier.

Everything is a function of its arguments, without network or processes; only the
solvers' time limit reads a clock. ``place`` solves a ``Problem`` with a ``Placement``
in which ``verify.faults`` finds no fault.
"""

from multiworld.serve.placement.solver.portfolio import place
from multiworld.serve.placement.solver.problem import (
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
