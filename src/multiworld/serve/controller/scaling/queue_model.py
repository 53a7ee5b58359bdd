"""Waiting time in a queue that several replicas serve. Pure.

The mean is Sakasegawa's approximation of a GI/G/c queue ("An approximation formula L_q
= a·rho^b/(1-rho)", Annals of the Institute of Statistical Mathematics 29, 1977), as
given by Whitt ("Approximating the GI/G/m queue", 1993). The tail is the exact one of
M/M/c: the wait of a request that has to wait is exponentially distributed.

``rate`` is in arrivals per second; ``item_s`` is a replica's time for one request.
"""

from __future__ import annotations

import math

SATURATED = 0.97  # utilization above which a queue counts as growing without limit


def mean_wait_s(
    rate: float, item_s: float, servers: int, variability: float = 1.0
) -> float:
    """Return the mean wait for a replica; infinity if saturated."""
    # ``variability``: half the sum of the squared coefficients of variation of
    # interarrival and service times: 1 for M/M/c, 0.5 for M/D/c.
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
    """Return the mean number of requests waiting or in service (Little's law)."""
    return rate * (item_s + mean_wait_s(rate, item_s, servers, variability))


def wait_quantile_s(
    rate: float,
    item_s: float,
    servers: int,
    variability: float = 1.0,
    share: float = 0.99,
) -> float:
    """Return the time within which ``share`` of the requests start service."""
    mean = mean_wait_s(rate, item_s, servers, variability)
    if mean == 0.0 or math.isinf(mean):
        return mean
    load = rate * item_s / servers
    waiting_share: float = min(1.0, load ** (math.sqrt(2.0 * (servers + 1)) - 1.0))
    if waiting_share <= 1.0 - share:
        return 0.0
    return mean / waiting_share * math.log(waiting_share / (1.0 - share))
