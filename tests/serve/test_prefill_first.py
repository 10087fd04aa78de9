"""`--prefill-urls`: a prompt goes to a prefill server first, and its request to a decode server in any case."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from patience import PATIENCE
from slipstream.base.errors import InvalidOption
from slipstream.serve.cli.main import main
from slipstream.serve.http.server.replica_proxy import ReplicaProxy
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.url_replicas import PrefillFirst, UrlReplicas, named_model, shortened

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [{"type": "function"}],
    "max_completion_tokens": 50,
    "stream": True,
    "n": 3,
    "stop": ["x"],
    "use_beam_search": True,
    "length_penalty": 2.0,
    "logprobs": True,
    "logprob_token_ids": [5],
    "return_tokens_as_token_ids": True,
    "guided_json": {},
    "guided_whitespace_pattern": " ",
}


class Answering:
    """A server that answers every POST with its name, or ends the connection."""

    def __init__(self, name: str, log: list) -> None:
        self.name, self.log, self.fails = name, log, False

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader, writer) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        body = await reader.readexactly(length)
        if not head.startswith(b"GET"):
            self.log.append((self.name, json.loads(body), b"authorization: bearer k" in lines))
        if head.startswith(b"GET") or not self.fails:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(self.name), self.name.encode()))
        writer.close()


def ask(path: str, fields: dict, *, fails: bool = False) -> tuple[bytes, list, PrefillFirst]:
    """The answer of a proxy over a prefill and a decode server, what they received, and the counters."""

    async def run():
        log: list = []
        prefill, decode = Answering("prefill", log), Answering("decode", log)
        for each in (prefill, decode):
            await each.start()
        prefill.fails = fails
        first = PrefillFirst(UrlReplicas([prefill.url]))
        proxy = ReplicaProxy(ServerSettings(allowed_hosts=["*"]), UrlReplicas([decode.url]), first)
        for replica in (*proxy.replicas.all, *first.replicas.all):
            await replica.check()
        listener = socket.create_server(("127.0.0.1", 0))
        server = await proxy.serve(listener)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        body = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer k\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
        for each in (server, prefill.server, decode.server):
            each.close()
        return answer, log, first

    return asyncio.run(run())


def test_the_prompt_goes_to_the_prefill_server_and_the_request_to_the_decode_server():
    answer, log, first = ask("/v1/chat/completions", CHAT)
    assert answer.endswith(b"decode")
    short = {name: CHAT[name] for name in ("model", "messages", "tools")} | {"max_tokens": 1}
    assert log == [("prefill", short, True), ("decode", CHAT, True)]
    assert (first.num_prefilled, first.num_failed) == (1, 0)


def test_a_prefill_server_that_fails_does_not_fail_the_request():
    answer, log, first = ask("/v1/completions", {"prompt": "a", "max_tokens": 9}, fails=True)
    assert answer.endswith(b"decode") and log[-1][0] == "decode"
    assert first.num_failed == 1 and not first.replicas.all[0].is_ready


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/completions", {"prompt": "a", "echo": True}),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 0}),
    ],
)
def test_other_requests_go_to_the_decode_server_alone(path, fields):
    _, log, _ = ask(path, fields)
    assert [name for name, _, _ in log] == ["decode"]


DEEP = b'{"model": "a", "x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"prompt": "\xff"}', DEEP])
def test_a_body_that_is_no_request_is_left_to_the_decode_server(body):
    assert shortened(b"/v1/completions", body) is None
    assert named_model(body) is None


def test_prefill_urls_need_replica_urls(capsys):
    assert main(["serve", "--prefill-urls", "http://a:1"]) == 2
    assert "give --replica-urls too" in capsys.readouterr().err


def test_a_wrong_url_is_named():
    with pytest.raises(InvalidOption, match="replica URL"):
        PrefillFirst(UrlReplicas(["here"]))
