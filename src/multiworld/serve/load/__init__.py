"""Open-loop load generator: sends requests on time, answered or not."""
