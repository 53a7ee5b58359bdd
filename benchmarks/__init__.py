"""Benchmarks of ``python -m benchmarks``: the data path beside its alternatives.

Every suite runs all its contenders in one session and in turns, so that a noisy minute
hits all of them. It reports medians, p99 and ratios. Absolute numbers depend on the
machine; compare within a table.
"""
