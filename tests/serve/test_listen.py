"""The port: one server has it, alone or with several listeners, and a second one is refused."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack

import pytest

from slipstream.base.errors import InvalidOption
from slipstream.serve.http.server.listen import PortClaim
from slipstream.serve.http.server.settings import ServerSettings


def settings(**given):
    return ServerSettings(port=0, **given)


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("second", [1, 2])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_second_server_on_the_port_is_refused(first, second, host):
    with ExitStack() as stack:
        claim = PortClaim(settings(workers=first))
        for _ in range(first):
            stack.enter_context(claim.listener())
        with pytest.raises(InvalidOption, match=f"port {claim.port}.*choose"):
            PortClaim(ServerSettings(port=claim.port, workers=second, host=host))


def test_each_front_end_has_a_listener_of_its_own():
    claim = PortClaim(settings(workers=2))
    with claim.listener() as one, claim.listener() as two, ExitStack() as stack:
        assert one.getsockname() == two.getsockname() == ("127.0.0.1", claim.port)
        taken = {id(one): 0, id(two): 0}
        for sock in (one, two):
            sock.setblocking(False)
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", claim.port)))
        for sock in (one, two):
            while True:
                try:
                    stack.enter_context(sock.accept()[0])
                except BlockingIOError:
                    break
                taken[id(sock)] += 1
        assert sum(taken.values()) == 64 and min(taken.values()) > 0


def test_a_front_end_that_is_started_again_gets_a_new_listener_on_the_port():
    claim = PortClaim(settings(workers=2))
    with claim.listener() as one:
        claim.listener().close()
        with claim.listener() as again, pytest.raises(InvalidOption):
            assert again.getsockname() == one.getsockname()
            PortClaim(ServerSettings(port=claim.port, workers=2))


def test_servers_that_start_at_once_do_not_share_the_port():
    """Every one claims the port before any has a second listener."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for _ in range(20):
        start, ends = threading.Barrier(4), []

        def serve(start=start, ends=ends):
            start.wait()
            try:
                ends.append(PortClaim(ServerSettings(port=port, workers=2)).listener())
            except InvalidOption as error:
                ends.append(error)

        threads = [threading.Thread(target=serve) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        listeners = [end for end in ends if isinstance(end, socket.socket)]
        assert len(listeners) <= 1 and len(ends) == 4, ends
        for listener in listeners:
            listener.close()


@pytest.mark.parametrize("host", ["203.0.113.1", "::ffff:203.0.113.1"])
def test_an_address_of_another_machine_is_refused(host):
    with pytest.raises(InvalidOption, match="cannot listen"):
        PortClaim(settings(host=host))
