"""Vendors' APIs for generation: OpenAI, Anthropic, Cohere, Ollama."""
