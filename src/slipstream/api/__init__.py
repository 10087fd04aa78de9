"""The public classes: LLM, AsyncLLM and LLMEngine, with all of vLLM's names."""
