"""One folder for each op: a reference in torch, kernels in Triton and C, and the choice among them."""
