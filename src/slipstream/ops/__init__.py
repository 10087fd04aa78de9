"""Six families of ops: definition in torch, kernels in C, Triton and Gluon, and the choice among them."""
