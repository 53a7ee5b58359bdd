"""Waiting time in a queue that several replicas serve. Pure.

The mean is Sakasegawa's approximation of a GI/G/c queue ("An approximation formula L_q
= a·rho^b/(1-rho)", Annals of the Institute of Statistical Mathematics 29, 1977), as
given by Whitt ("Approximating the GI/G/m queue", 1993). The tail is the exact one of
M/M/c: the wait of a request that waits is exponentially distributed.
"""

from __future__ import annotations

import math

SATURATED = 0.97
"""Utilisation from which a queue counts as growing without limit."""


def mean_wait_s(
    rate: float, item_s: float, servers: int, variability: float = 1.0
) -> float:
    """Return the mean seconds until a replica starts a request.

    Args:
        rate: Arrivals a second.
        item_s: Seconds that one replica is busy with one request.
        servers: Replicas.
        variability: Half the sum of the squared coefficients of variation of the times
            between arrivals and of the computing times; 1 for M/M/c, 0.5 for M/D/c.

    Returns:
        Seconds; infinity if the queue is saturated.
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
    """Return the mean number of requests that wait or are computed (Little's law).

    Args:
        rate: Arrivals a second.
        item_s: Seconds that one replica is busy with one request.
        servers: Replicas.
        variability: See ``mean_wait_s``.
    """
    return rate * (item_s + mean_wait_s(rate, item_s, servers, variability))


def wait_quantile_s(
    rate: float,
    item_s: float,
    servers: int,
    variability: float = 1.0,
    share: float = 0.99,
) -> float:
    """Return the seconds within which a share of the requests starts being computed.

    Args:
        rate: Arrivals a second.
        item_s: Seconds that one replica is busy with one request.
        servers: Replicas.
        variability: See ``mean_wait_s``.
        share: Share of the requests, between 0 and 1.

    Returns:
        Seconds; infinity if the queue is saturated.
    """
    mean = mean_wait_s(rate, item_s, servers, variability)
    if mean == 0.0 or math.isinf(mean):
        return mean
    load = rate * item_s / servers
    waiting_share: float = min(1.0, load ** (math.sqrt(2.0 * (servers + 1)) - 1.0))
    if waiting_share <= 1.0 - share:
        return 0.0
    return mean / waiting_share * math.log(waiting_share / (1.0 - share))
