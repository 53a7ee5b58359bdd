"""Traces: spans of requests and of the controller's operations, for OpenTelemetry."""
