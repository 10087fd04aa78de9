"""Models: shapes, layers, weights, families, decoder and encoder, chains of kernels, adapters."""
