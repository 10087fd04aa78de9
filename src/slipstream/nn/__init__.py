"""Models: shapes, layers, blocks, weights and attention backends."""
