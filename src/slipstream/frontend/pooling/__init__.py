"""Pooling in the front end: parameters, prompts, calls (encode, score, rerank) and results."""
