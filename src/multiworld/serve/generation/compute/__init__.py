"""A stage's forward pass: KV cache, attention, layers, sampling."""
