"""Engines of others: vLLM, llama.cpp, and servers with OpenAI's API."""
