"""Tenants: API keys, limits, usage, and the registry that stores them."""
