"""Weights: formats, and how a checkpoint's tensors become them."""
