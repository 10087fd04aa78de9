"""TransferConfig: hand-off of KV cache pages between engines (vLLM's `kv_transfer_config`), and its checks.

A producer computes prompts and serves the pages of its second cache tier to others. A consumer asks its peers for pages
that it does not have, and computes what they do not send in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from slipstream.errors import InvalidOption

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
"""Names of `slipstream serve --role`, and vLLM's."""

DEFAULT_PORT = 14579
DEFAULT_BUFFER = 10**9
"""Bytes of host memory for pages, if kv_offloading_size is not given; vLLM's default too."""

_FIELDS = (
    "kv_role",
    "kv_ip",
    "kv_port",
    "kv_peers",
    "kv_buffer_size",
    "kv_timeout",
    "kv_connector",
    "kv_connector_extra_config",
)


class TransferConfig(msgspec.Struct, frozen=True):
    listen: tuple[str, int] | None = None  # host and port at which pages are served; None: a consumer
    peers: tuple[tuple[str, int], ...] = ()  # that are asked for pages
    timeout: float = 5.0  # seconds that a request waits for pages of peers
    buffer_bytes: int = DEFAULT_BUFFER
    cuda_ipc: bool = False  # pages pass from device to device where the peer has it too and is on the same host


def read_transfer_config(given: Mapping[str, Any] | str | None, own_role: str | None = None) -> TransferConfig | None:
    """From the option, an object or its JSON. `own_role`: a name of ROLES, instead of the object's."""
    if not given and own_role is None:
        return None
    given = given or {}
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except msgspec.DecodeError as error:
            raise InvalidOption(f"kv_transfer_config is not JSON: {error}") from None
    if not isinstance(given, Mapping):
        raise InvalidOption('kv_transfer_config is no object; give one like {"kv_role": "kv_producer"}')
    for name in given:
        if name not in _FIELDS:
            raise InvalidOption(f"kv_transfer_config has no field {name!r:.50} here; it has {', '.join(_FIELDS)}")
    if given.get("kv_connector") is not None:
        raise InvalidOption(
            f"kv_connector is {given['kv_connector']!r:.50}; pages are sent over TCP by the engine itself: remove it"
        )
    role = given.get("kv_role", own_role and ROLES[own_role])
    if own_role is not None and role != ROLES[own_role]:
        raise InvalidOption(f"role is {own_role} and kv_role {role!r:.50}; remove one of them")
    if role not in ROLES.values():
        raise InvalidOption(f"kv_role is {role!r:.50}; give {', '.join(ROLES.values())}")
    host, port = given.get("kv_ip", "127.0.0.1"), given.get("kv_port", DEFAULT_PORT)
    if not isinstance(host, str) or type(port) is not int or not 0 <= port < 65536:
        raise InvalidOption(f"kv_ip is {host!r:.50} and kv_port {port!r:.50}; give a host and a port up to 65535")
    own = (host, port)
    listens = role != "kv_consumer"
    peers = given.get("kv_peers", [] if listens else [f"{host}:{port}"])
    if not isinstance(peers, list) or (peers and role == "kv_producer"):
        raise InvalidOption("kv_peers is a list of host:port, of a kv_consumer or kv_both")
    timeout, size = given.get("kv_timeout", 5.0), given.get("kv_buffer_size", DEFAULT_BUFFER)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 600:
        raise InvalidOption(f"kv_timeout is {timeout!r:.50}; give seconds, up to 600")
    if isinstance(size, bool) or not isinstance(size, int | float) or not size > 0:
        raise InvalidOption(f"kv_buffer_size is {size!r:.50}; give bytes of host memory")
    by_device = _reads_devices(given.get("kv_connector_extra_config"))
    return TransferConfig(own if listens else None, tuple(map(_peer, peers)), float(timeout), int(size), by_device)


def _reads_devices(given: object) -> bool:
    """The field cuda_ipc of kv_connector_extra_config, its only one."""
    if given is None:
        return False
    if not isinstance(given, Mapping) or given.keys() - {"cuda_ipc"} or type(given.get("cuda_ipc", False)) is not bool:
        raise InvalidOption(f'kv_connector_extra_config is {given!r:.100}; it may be {{"cuda_ipc": true}}')
    return bool(given.get("cuda_ipc", False))


def _peer(text: object) -> tuple[str, int]:
    host, _, port = str(text).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidOption(f"a peer is {text!r:.100}; give host:port")
    return host.strip("[]"), int(port)
