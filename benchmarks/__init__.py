"""Benchmarks of ``python -m benchmarks``: the data path compared with alternatives.

Every suite runs all its contenders alternately in one session, so that a noisy minute
affects all of them. It reports medians, worst rounds and ratios. Absolute numbers
depend on the machine; compare within a table.
"""
