"""The HTTP server, its limits and responses, health and metrics."""
