"""Message transport between front ends and a core: in one process, or by msgpack over a socket. Without torch."""
