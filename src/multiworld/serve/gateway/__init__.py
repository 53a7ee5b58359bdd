"""HTTP gateway: OpenAI's API, the Open Inference Protocol, health and metrics."""
