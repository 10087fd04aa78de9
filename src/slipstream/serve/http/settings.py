"""Settings: what the server itself may be told, beside the engine's options. Flags and docs are made from this list."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    host: Annotated[str, _doc("address to listen on; 0.0.0.0 lets other machines in")] = "127.0.0.1"
    port: Annotated[int, _doc("port to listen on; 0 takes a free one")] = 8000
    uds: Annotated[str | None, _doc("path of a unix socket to listen on, instead of host and port")] = None
    ssl_certfile: Annotated[
        str | None, _doc("a certificate in PEM format, with those that vouch for it; the server then speaks https")
    ] = None
    ssl_keyfile: Annotated[str | None, _doc("its key, where that is in a file of its own")] = None
    workers: Annotated[int, _doc("front-end processes on the one port, for when tokenising is the wall")] = 1
    api_key: Annotated[list[str], _doc("a key that requests must bring; may be given several times")] = []
    admin_key: Annotated[str | None, _doc("the key of the admin routes; without one they are closed")] = None

    allowed_hosts: Annotated[
        list[str],
        _doc(
            "names under which the server may be asked (the header Host), beside those of loopback where it listens "
            "there; *.example.com for all below, * for any; may be given several times. Default: loopback names on "
            "loopback, any elsewhere"
        ),
    ] = []
    allowed_origins: Annotated[
        list[str],
        _doc("web pages of this origin may ask; * lets all in; may be given several times, or as a JSON list"),
    ] = []
    allowed_methods: Annotated[list[str], _doc("what such pages may do; * or none given: all there is")] = []
    allowed_headers: Annotated[list[str], _doc("headers that such pages may send; * or none given: any")] = []
    allow_credentials: Annotated[bool, _doc("let such pages send cookies and the like")] = False

    log_level: Annotated[
        Literal["error", "warning", "info", "debug"],
        _doc(
            "info writes a line for each request, with its id and the client's address; debug also one for each probe, "
            "and why requests were refused and what the engine did for them"
        ),
    ] = "warning"

    log_format: Annotated[Literal["text", "json"], _doc("json writes an object a line, with the request's id")] = "text"
    status_interval: Annotated[float, _doc("seconds between two lines of status in the log; 0 writes none")] = 10.0
    otlp_traces_endpoint: Annotated[
        str | None, _doc("where traces are sent, as OTLP over HTTP; needs the extra otel")
    ] = None

    max_queued_requests: Annotated[int, _doc("prompts that may wait; more get 429, or 400 if of one request")] = 1024
    max_queued_tokens: Annotated[int, _doc("tokens of the prompts that wait; more get 429")] = 2**22
    request_timeout: Annotated[
        float | None, _doc("seconds a request may take in all; a request may ask for less by X-Request-Timeout")
    ] = None
    stream_interval: Annotated[
        int, _doc("tokens that a stream collects for an event, after the first; more of them cost the front end less")
    ] = 1
    stream_keep_alive: Annotated[
        float, _doc("seconds of silence after which a stream says that it is alive, lest a proxy cut it; 0: never")
    ] = 15.0
    drain_timeout: Annotated[float, _doc("seconds that requests may go on after SIGTERM")] = 30.0
    watchdog_timeout: Annotated[
        float, _doc("seconds of silence from a busy engine after which /health says so; 0 turns it off")
    ] = 300.0

    max_body_bytes: Annotated[int, _doc("of a request's body")] = 2**24
    max_bodies_bytes: Annotated[int, _doc("of all bodies that one front end is reading; more get 429")] = 2**28
    body_timeout: Annotated[
        float, _doc("seconds for a request's body to come; each 16 KiB of it that have come allow one more")
    ] = 30.0
    max_header_bytes: Annotated[int, _doc("of a request's line and headers")] = 2**16
    max_answer_bytes: Annotated[int, _doc("of the numbers in one answer, before they are written as JSON")] = 2**27
    max_inputs: Annotated[int, _doc("prompts in one request")] = 1024
    max_n: Annotated[int, _doc("samples of one prompt")] = 128
    max_samples: Annotated[int, _doc("samples of all prompts of one request: prompts times n")] = 1024
    max_logprobs: Annotated[int, _doc("likeliest tokens reported with each token")] = 20
    max_stop: Annotated[int, _doc("stop strings, stop tokens, bad words or logprob token ids of one request")] = 128
    max_stop_chars: Annotated[int, _doc("characters of a stop string or a bad word")] = 1024
    max_bias: Annotated[int, _doc("entries of logit_bias")] = 1024
    max_salt_chars: Annotated[int, _doc("characters of a cache salt")] = 256
