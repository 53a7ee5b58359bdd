"""Services of the serving benchmarks, and their clients."""

OURS, WHOLE, RAY = "three stages", "one stage", "ray serve"
BARE, CHAIN = "bare", "chain"
