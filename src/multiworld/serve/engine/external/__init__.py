"""External engines: vLLM, llama.cpp, and servers with OpenAI's API."""
