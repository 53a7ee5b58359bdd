"""Open-loop load generator: requests leave on time, answered or not."""
