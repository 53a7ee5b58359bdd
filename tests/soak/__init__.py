"""Soak test: a fleet under traffic, and a random but seeded schedule of faults."""
