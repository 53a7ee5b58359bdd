"""Tenants: API keys, limits, fair queueing, quarantine and usage."""
