"""HTTP gateway: Open Inference Protocol, OpenAI embeddings, health and metrics."""
