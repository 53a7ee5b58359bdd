"""Worlds demo: a leader and two workers run a real model, and one worker is killed."""
