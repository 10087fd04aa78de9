"""The line between front ends and a core: in one process, or across two by msgpack over a socket. No torch."""
