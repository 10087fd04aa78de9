"""Which network interface of this machine has an address."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # of Linux: the address of an interface
_NAME_BYTES = 16


def interface_of(address: str) -> str | None:
    """The name of the interface; None: none has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s24x", name.encode())
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no such address
                continue
            if socket.inet_ntoa(answer[_NAME_BYTES + 4 : _NAME_BYTES + 8]) == address:
                return name
    return None
