"""The Open Inference Protocol v2, and Triton's additions to it."""
