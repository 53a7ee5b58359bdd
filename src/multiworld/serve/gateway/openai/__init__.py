"""OpenAI's completions, chats, tools and embeddings; Triton's generate."""
