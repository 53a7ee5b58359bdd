"""Admission of requests: keys, rate limits, budgets and quarantine."""
