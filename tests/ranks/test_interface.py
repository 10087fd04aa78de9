"""The network interface by which ranks on GPUs of several nodes find each other."""

from __future__ import annotations

import sys

import pytest

from slipstream.device import collectives
from slipstream.device.collectives import interface_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names of Linux; NCCL runs nowhere else")


def test_an_address_names_its_interface():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None


@pytest.mark.parametrize(
    ("address", "environment", "wanted"),
    [
        ("10.0.0.7", {}, "=eth1"),
        ("10.0.0.8", {}, None),  # no interface has it
        ("127.0.0.1", {}, None),  # ranks of one machine
        ("10.0.0.7", {"NCCL_SOCKET_IFNAME": "ib0"}, None),  # stays as it is
        ("10.0.0.7", {"SLIPSTREAM_RANKS_SHARE_GPU": "1"}, "lo"),
    ],
)
def test_nccl_uses_the_interface_of_the_rank(address, environment, wanted, monkeypatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(collectives, "interface_of", {"10.0.0.7": "eth1", "127.0.0.1": "lo"}.get)
    assert collectives._nccl_variables(1, address).get("NCCL_SOCKET_IFNAME") == wanted
