"""Reads what the files of a model say. No torch, no options."""
