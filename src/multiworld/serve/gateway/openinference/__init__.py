"""Open Inference Protocol v2, and Triton's routes beside it."""
