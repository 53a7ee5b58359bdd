"""Requests with one answer: dispatch, replay and hedging."""
