"""``multiworld bench``: what the data path costs, beside what one could use instead.

Every suite runs all its contenders in one go and in turns, so that a noisy minute hits
all of them, and reports medians, p99 and ratios. Absolute numbers are of the machine;
compare within a table.
"""
