"""Checkpoints and options: what a model's files say, and Options to a frozen EngineConfig."""
