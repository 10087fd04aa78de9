"""Bidirectional attention: each token attends to all tokens of its row, before and after it."""
