"""Requests with one answer: where they go, replay and hedging."""
