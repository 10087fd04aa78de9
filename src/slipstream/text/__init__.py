"""Tokenizers, chat templates, detokenizing and stop strings."""
