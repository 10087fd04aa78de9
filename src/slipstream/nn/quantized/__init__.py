"""Weights of quantised checkpoints: FP8, AWQ, GPTQ, compressed-tensors; and weights quantised at load."""
