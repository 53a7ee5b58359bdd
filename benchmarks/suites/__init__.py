"""Suites; each makes one kind of measurement for every contender that supports it."""
