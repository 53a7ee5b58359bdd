"""The HTTP side: Open Inference Protocol, OpenAI's embeddings, health and metrics."""
