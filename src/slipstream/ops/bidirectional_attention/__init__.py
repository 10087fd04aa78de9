"""Attention of whole rows: each token sees its own row of the step, before it and after."""
