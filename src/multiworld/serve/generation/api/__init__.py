"""HTTP API of text generation: OpenAI's routes and Triton's."""
