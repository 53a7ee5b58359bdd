"""Which replica goes where: a problem, a portfolio of solvers, and a verifier.

Everything here is a function of its arguments: no clock but the solvers' own limit, no
network, no process. ``place`` answers a ``Problem`` with a ``Placement`` that
``verify.faults`` finds nothing wrong with; ``chains`` is the same for models that are
cut while they are placed, one range of layers a node.
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
