"""Benchmarks of ``python -m benchmarks``: the data path compared with alternatives.

Every suite runs all its contenders alternately in one session, so that a noisy minute
affects all of them; only capacity, kills and engine_kills run theirs one after the
other. A suite reports medians, worst rounds and ratios. Absolute numbers depend on the
machine; compare within a table.
"""
