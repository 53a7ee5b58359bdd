"""OpenAI's completions, chats and tools; Triton's generate."""
