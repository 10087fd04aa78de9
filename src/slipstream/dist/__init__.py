"""Several processes that run one model: collectives, and the ring that carries plans from rank 0 to the others."""
