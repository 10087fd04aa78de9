"""Model families: shape and tensor names, nothing else."""
