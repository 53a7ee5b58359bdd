"""Replays a trace of requests against scaling policies, without any worker."""
