"""Layers, each with its shape rules, costs and shards."""
