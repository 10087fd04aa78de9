"""URLs of strangers: which addresses are connected to, redirects, sizes, times, and what ends alone."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE
from slipstream.base.errors import InvalidImage
from slipstream.images import fetch
from slipstream.images.fetch import Fetcher, FetchRules, is_public

TLS = Path(__file__).parents[1] / "serve/tls"
PUBLIC, LOCAL = "127.0.0.2", "127.0.0.1"  # the first is public in these tests
MAX = 10_000
Handler = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
RULES = FetchRules(
    domains=("images.test", "localhost"), connect_seconds=PATIENCE, read_seconds=PATIENCE, total_seconds=PATIENCE
)


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses by name, instead of a resolver."""
    known = {"images.test": [PUBLIC], "localhost": [PUBLIC]}

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        found = known.get(host) or [str(ipaddress.ip_address(host))]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(fetch, "is_public", lambda address: str(address) == PUBLIC or is_public(address))
    return known


@asynccontextmanager
async def served(handler: Handler, host: str = PUBLIC, **tls: Any) -> Any:
    """A server that reads a request and calls the handler with it. Gives its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(await reader.readuntil(b"\r\n\r\n"), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, host, 0, **tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def fixed(answer: bytes) -> Handler:
    async def handler(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    return handler


def ok(body: bytes, header: str = "Content-Type: text/html") -> bytes:
    return f"HTTP/1.1 200 OK\r\n{header}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def fetched(url: str, rules: FetchRules = RULES, max_bytes: int = MAX) -> bytes:
    fetcher = Fetcher(rules)
    try:
        return await fetcher.fetch(url, "caller", max_bytes)
    finally:
        fetcher.close()


def get(handler: Handler, path: str = "/a.png", rules: FetchRules = RULES) -> bytes:
    async def run() -> bytes:
        async with served(handler) as port:
            return await fetched(f"http://images.test:{port}{path}", rules)

    return asyncio.run(run())


def test_a_body_is_fetched_and_the_request_is_what_servers_expect() -> None:
    seen: list[bytes] = []

    async def handler(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(ok(b"bytes"))

    assert get(handler, "/käse/a b.png?x=%20&y=1#part") == b"bytes"
    lines = seen[0].decode().split("\r\n")
    assert lines[0] == "GET /k%C3%A4se/a%20b.png?x=%20&y=1 HTTP/1.1"
    assert lines[1].startswith("Host: images.test:") and "Accept-Encoding: identity" in lines


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nbyt\r\n2\r\nes\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nbytes",  # to the end of the connection
        b"HTTP/1.0 200 OK\r\n\r\nbytes",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nbytes",
    ],
    ids=["chunked", "until closed", "HTTP/1.0", "continued"],
)
def test_all_forms_of_answers_are_read(answer: bytes) -> None:
    assert get(fixed(answer)) == b"bytes"


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbytes",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbytes", b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    ],
    ids=["nothing", "another protocol", "short body", "open chunks", "short header", "upgrade"],
)  # fmt: skip
def test_an_answer_that_is_not_complete_is_an_error_of_its_image(answer: bytes) -> None:
    with pytest.raises(InvalidImage, match="images.test sent no complete answer"):
        get(fixed(answer))


@pytest.mark.parametrize("status", ["404 Not Found", "500 Oops", "204 No Content", "304 Not Modified"])
def test_other_answers_are_errors_with_their_code(status: str) -> None:
    with pytest.raises(InvalidImage, match=f"answered {status[:3]} instead of 200"):
        get(fixed(f"HTTP/1.1 {status}\r\n\r\n".encode()))


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test/a.png", "http://images.test.evil.test/a.png", "http://evil.test#images.test/a.png",
        "http://evil.test?@images.test", f"http://{PUBLIC}/a.png", "http://[::1]/a.png",
    ],
)  # fmt: skip
def test_other_domains_are_not_fetched(url: str) -> None:
    with pytest.raises(InvalidImage, match="are not fetched: the server allows images.test, localhost"):
        asyncio.run(fetched(url))


def test_without_allowed_domains_nothing_is_fetched() -> None:
    with pytest.raises(InvalidImage, match=r"allows no domain \(--allowed-media-domains\)"):
        asyncio.run(fetched("http://images.test/a.png", FetchRules()))


@pytest.mark.parametrize(
    "url",
    [
        "ftp://images.test/a", "//images.test/a", "images.test/a", "http:///a", "http://user:key@images.test/a",
        "http://images.test:0/a", "http://images.test:99999/a", "http://images.test\\@evil.test/a",
        "http://evil.test\r\nHost: images.test/a", "http://images.tést/a", "http://[::1/a", "http://" + 9000 * "a",
        "http://images.test%2f@evil.test/", "http://images.test%00.evil.test/",
    ],
)  # fmt: skip
def test_urls_that_parsers_read_in_several_ways_are_refused(url: str) -> None:
    with pytest.raises(InvalidImage):
        asyncio.run(fetched(url))


PRIVATE = [
    "127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.100.100.200",
    "192.0.0.192", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "168.63.129.16", "192.0.2.1",
    "::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1", "2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:0:7f00:1::", "2001:0:4136:e378:8000:63bf:80ff:fffe",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_of_machines_networks_and_clouds_are_refused(names: dict[str, list[str]], address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    names["images.test"] = [address]
    with pytest.raises(InvalidImage, match="its address is of this machine or a private network"):
        asyncio.run(fetched("http://images.test/a.png"))


@pytest.mark.parametrize(
    "address",
    ["93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"],
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("host", ["2130706433", "0x7f000001", "127.1", "0177.0.0.1", "127.0.0.1.", "localhost"])
def test_other_spellings_of_this_machine_are_refused(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """As the system's resolver reads them."""
    names.clear()
    monkeypatch.undo()
    with pytest.raises(InvalidImage, match="private network|cannot be reached"):
        asyncio.run(fetched(f"http://{host}/a.png", FetchRules(domains=("*",))))


def test_with_a_star_every_public_domain_is_fetched(names: dict[str, list[str]]) -> None:
    async def run() -> bytes:
        async with served(fixed(ok(b"bytes"))) as port:
            return await fetched(f"http://any.test:{port}/", FetchRules(domains=("*",)))

    names["any.test"] = [PUBLIC]
    assert asyncio.run(run()) == b"bytes"


def test_the_connection_goes_to_the_address_that_was_checked(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that has a public address first, and that of this machine the next time, is resolved once."""
    asked: list[str] = []
    known = socket.getaddrinfo

    def rebound(host: str, port: int, **fields: Any) -> Any:
        asked.append(host)
        found = known(host, port, **fields)
        names["images.test"] = [LOCAL]
        return found

    async def run() -> bytes:
        async with served(fixed(ok(b"public"))) as port, served(fixed(ok(b"secret")), LOCAL):
            monkeypatch.setattr(socket, "getaddrinfo", rebound)
            return await fetched(f"http://images.test:{port}/")

    assert asyncio.run(run()) == b"public"
    assert [host for host in asked if host == "images.test"] == ["images.test"]


def test_of_mixed_addresses_only_public_ones_are_tried(names: dict[str, list[str]]) -> None:
    async def run() -> bytes:
        async with served(fixed(ok(b"public"))) as port:
            names["images.test"] = [LOCAL, "127.0.0.3", PUBLIC]
            return await fetched(f"http://images.test:{port}/")

    assert asyncio.run(run()) == b"public"


def redirect(url: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {url}\r\nContent-Length: 3\r\n\r\nabc".encode()


def test_redirects_are_followed_also_relative_ones() -> None:
    async def handler(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = request.split()[1]
        writer.write(ok(b"bytes") if path == b"/b/d.png" else redirect("d.png" if path == b"/b/c.png" else "/b/c.png"))

    assert get(handler) == b"bytes"


@pytest.mark.parametrize(
    "target", [f"http://{LOCAL}:%d/", "http://inner.test:%d/", "//inner.test:%d/", "file:///etc/passwd", "gopher://x/"]
)
def test_a_redirect_is_checked_like_the_first_url(names: dict[str, list[str]], target: str) -> None:
    names["inner.test"] = [LOCAL]

    async def run() -> bytes:
        async with served(fixed(ok(b"secret")), LOCAL) as inner:
            url = target % inner if "%d" in target else target
            async with served(fixed(redirect(url))) as port:
                return await fetched(f"http://images.test:{port}/", FetchRules(domains=("*",)))

    with pytest.raises(InvalidImage, match="private network|is no http or https URL"):
        asyncio.run(run())


def test_redirects_without_end_are_refused() -> None:
    with pytest.raises(InvalidImage, match="redirected more than 5 times"):
        get(fixed(redirect("/again")))


def test_a_length_over_the_limit_is_refused_by_the_header() -> None:
    with pytest.raises(InvalidImage, match=f"an image has 10001 bytes, and at most {MAX} are accepted"):
        get(fixed(f"HTTP/1.1 200 OK\r\nContent-Length: {MAX + 1}\r\n\r\n".encode()))
    assert len(get(fixed(ok(bytes(MAX))))) == MAX


@pytest.mark.parametrize("kind", ["chunked", "plain", "header", "false length"])
def test_an_answer_without_end_is_cut_while_it_arrives(kind: str) -> None:
    start = {
        "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        "plain": b"HTTP/1.1 200 OK\r\n\r\n",
        "header": b"HTTP/1.1 200 OK\r\n",
        "false length": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
    }[kind]
    part = {"chunked": b"400\r\n" + bytes(1024) + b"\r\n", "header": b"X-Name: " + 500 * b"x" + b"\r\n"}

    async def handler(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        while True:
            writer.write(part.get(kind, bytes(1024)))
            await writer.drain()

    with pytest.raises(InvalidImage, match="more bytes|header without end|no complete answer|99999999999999999999 byt"):
        get(handler)


@pytest.mark.parametrize("part", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab", b""])
def test_a_server_that_stops_sending_is_left(part: bytes) -> None:
    async def handler(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(part)
        await reader.read()  # until the client has gone

    with pytest.raises(InvalidImage, match="no complete answer: no answer in time"):
        get(handler, rules=fetch_rules(read_seconds=0.2))


def fetch_rules(**changes: Any) -> FetchRules:
    fields = {name: getattr(RULES, name) for name in RULES.__struct_fields__}
    return FetchRules(**(fields | changes))


def test_a_server_that_sends_slowly_is_left_after_the_total_time() -> None:
    async def handler(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    with pytest.raises(InvalidImage, match="was not fetched within 0.5 s"):
        get(handler, rules=fetch_rules(total_seconds=0.5))


def test_a_server_that_does_not_listen_is_an_error() -> None:
    async def run() -> bytes:
        async with served(fixed(b"")) as port:
            pass
        return await fetched(f"http://images.test:{port}/")

    with pytest.raises(InvalidImage, match="images.test cannot be reached: "):
        asyncio.run(run())


def test_a_resolver_that_hangs_holds_up_neither_the_loop_nor_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    known, release = socket.getaddrinfo, threading.Event()

    def hanging(host: str, port: int, **fields: Any) -> Any:
        if host == "slow.test":
            assert release.wait(PATIENCE)
        return known("images.test", port, **fields)

    async def run() -> bytes:
        fetcher = Fetcher(fetch_rules(domains=("*",), connect_seconds=0.3))
        async with served(fixed(ok(b"bytes"))) as port:
            slow = [asyncio.ensure_future(fetcher.fetch(f"http://slow.test:{port}/", "a", MAX)) for _ in range(6)]
            await asyncio.sleep(0)
            found = await Fetcher(RULES).fetch(f"http://images.test:{port}/", "b", MAX)
            for each in slow:
                with pytest.raises(InvalidImage, match="slow.test cannot be reached: no answer in time"):
                    await each
            release.set()
            fetcher.close()
            return found

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    assert asyncio.run(run()) == b"bytes"


def test_a_fetch_that_is_cancelled_ends_its_connection_and_no_other() -> None:
    async def run() -> bytes:
        arrived, left, release = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def handler(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if b"hangs" in request:
                arrived.set()
                await reader.read()
                left.set()
            else:
                await release.wait()
                writer.write(ok(b"bytes"))

        fetcher = Fetcher(RULES)
        async with served(handler) as port:
            hanging = asyncio.ensure_future(fetcher.fetch(f"http://images.test:{port}/hangs", "a", MAX))
            other = asyncio.ensure_future(fetcher.fetch(f"http://images.test:{port}/other", "b", MAX))
            await asyncio.wait_for(arrived.wait(), PATIENCE)
            hanging.cancel()
            await asyncio.wait_for(left.wait(), PATIENCE)
            release.set()
            found = await other
            fetcher.close()
            assert hanging.cancelled()
            return found

    assert asyncio.run(run()) == b"bytes"


def test_one_caller_has_half_of_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_MAX_OPEN", 4)

    async def run() -> None:
        open_now: list[bytes] = []

        async def handler(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            path = request.split()[1]
            open_now.append(path)
            if path == b"/other":
                writer.write(ok(b"bytes"))
            else:
                await reader.read()

        fetcher = Fetcher(RULES)
        async with served(handler) as port:
            url = f"http://images.test:{port}"
            many = [asyncio.ensure_future(fetcher.fetch(f"{url}/{each}", "many", MAX)) for each in range(5)]
            await asyncio.sleep(0)
            assert await fetcher.fetch(f"{url}/other", "one", MAX) == b"bytes"
            assert len([path for path in open_now if path != b"/other"]) <= 2
            for each in many:
                each.cancel()
            await asyncio.wait(many)
            assert await fetcher.fetch(f"{url}/other", "many", MAX) == b"bytes"  # all have left
        fetcher.close()

    asyncio.run(run())


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Clients trust the certificate of the tests, for localhost. Gives the server's context."""
    made = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda: made(cafile=str(TLS / "server.crt")))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.crt", TLS / "server.key")
    return context


def test_the_certificate_is_that_of_the_name(trusted: ssl.SSLContext) -> None:
    """The connection goes to an address, and the name is in the handshake and in the certificate."""
    asked: list[str | None] = []
    trusted.sni_callback = lambda _, name, __: asked.append(name)

    async def run(host: str) -> bytes:
        async with served(fixed(ok(b"bytes")), ssl=trusted) as port:
            return await fetched(f"https://{host}:{port}/")

    assert asyncio.run(run("localhost")) == b"bytes" and asked == ["localhost"]
    with pytest.raises(InvalidImage, match="images.test cannot be reached: .*certificate"):
        asyncio.run(run("images.test"))


def test_a_certificate_of_a_stranger_is_refused() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.crt", TLS / "server.key")

    async def run() -> bytes:
        async with served(fixed(ok(b"bytes")), ssl=context) as port:
            return await fetched(f"https://localhost:{port}/")

    with pytest.raises(InvalidImage, match="localhost cannot be reached: .*certificate"):
        asyncio.run(run())
