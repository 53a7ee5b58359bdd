"""How long requests wait where several replicas take them from one queue. Pure.

For the mean, Sakasegawa's approximation of a GI/G/c queue ("An approximation formula
L_q = a·rho^b/(1-rho)", Annals of the Institute of Statistical Mathematics 29, 1977), as
Whitt gives it ("Approximating the GI/G/m queue", 1993). For the tail, what is exact for
M/M/c: those who wait do so for an exponentially distributed time.
"""

from __future__ import annotations

import math

SATURATED = 0.97
"""Utilisation above which a queue is taken for one that only grows."""


def mean_wait_s(
    rate: float, item_s: float, servers: int, variability: float = 1.0
) -> float:
    """Return the mean seconds until a replica begins with a request.

    Args:
        rate: Arrivals a second.
        item_s: Seconds that one replica is busy with one request.
        variability: Half the sum of the squared coefficients of variation of the times
            between arrivals and of the computing; 1 for M/M/c, 0.5 for M/D/c.
    """
    load = rate * item_s / servers if servers else math.inf
    if rate <= 0 or item_s <= 0:
        return 0.0
    if load >= SATURATED:
        return math.inf
    power: float = math.sqrt(2.0 * (servers + 1)) - 1.0
    busy: float = load**power
    return variability * item_s * busy / (servers * (1.0 - load))


def ongoing(
    rate: float, item_s: float, servers: int, variability: float = 1.0
) -> float:
    """Return how many requests wait or are computed, on average (Little's law)."""
    return rate * (item_s + mean_wait_s(rate, item_s, servers, variability))


def wait_quantile_s(
    rate: float,
    item_s: float,
    servers: int,
    variability: float = 1.0,
    share: float = 0.99,
) -> float:
    """Return the seconds that a ``share`` of all requests waits at most."""
    mean = mean_wait_s(rate, item_s, servers, variability)
    if mean == 0.0 or math.isinf(mean):
        return mean
    load = rate * item_s / servers
    waiting_share: float = min(1.0, load ** (math.sqrt(2.0 * (servers + 1)) - 1.0))
    if waiting_share <= 1.0 - share:
        return 0.0
    return mean / waiting_share * math.log(waiting_share / (1.0 - share))
