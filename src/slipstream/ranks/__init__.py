"""Several processes for one model. With two GPUs it never ran: ranks were tested on the CPU and on one GPU."""
