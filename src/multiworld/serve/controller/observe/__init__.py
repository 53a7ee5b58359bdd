"""Observation of a service for its operators: facts, rates and diagnoses."""
