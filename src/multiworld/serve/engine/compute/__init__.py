"""A stage's forward pass: KV caches, attention, layers, sampling."""
