"""Soak test: a fleet under traffic, and a random but seeded schedule of faults.

``python -m tests.soak --minutes 20 --seed 1`` prints a report, and exits with 1 if a
promise did not hold.
"""
