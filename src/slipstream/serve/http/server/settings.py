"""ServerSettings: the options of the HTTP server, from which its flags and their documentation are generated."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from slipstream.base.typed import doc


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    host: Annotated[str, doc("address to listen on; 0.0.0.0: reachable from other machines")] = "127.0.0.1"
    port: Annotated[int, doc("port to listen on; 0: any free port")] = 8000
    uds: Annotated[str | None, doc("path of a unix socket to listen on, instead of host and port")] = None
    ssl_certfile: Annotated[str | None, doc("TLS certificate chain in PEM format; enables https")] = None
    ssl_keyfile: Annotated[str | None, doc("private key of the certificate, if in a separate file")] = None
    workers: Annotated[
        int, doc("front-end processes that share the port; more help when tokenising is the bottleneck")
    ] = 1
    replica_urls: Annotated[
        list[str],
        doc(
            "base URL of a running server; requests are passed on to one of them, and no model is loaded here; "
            "repeatable, see docs/scale.md"
        ),
    ] = []
    prefill_urls: Annotated[
        list[str],
        doc(
            "with replica_urls: base URL of a server with role prefill, which computes the prompts of the replicas; "
            "repeatable, see docs/scale.md"
        ),
    ] = []
    api_key: Annotated[list[str], doc("API key that requests must send; repeatable")] = []
    share_prefix_cache_between_keys: Annotated[
        bool,
        doc(
            "with several API keys: requests of all keys share cached prefixes; saves memory and time, and "
            "cached_tokens and response times tell one key what another has sent"
        ),
    ] = False
    admin_key: Annotated[str | None, doc("key of the admin routes; without it they are disabled")] = None

    lora_folders: Annotated[
        list[str],
        doc("folder with adapters that /v1/load_lora_adapter may load; repeatable. Default: the route is disabled"),
    ] = []

    allowed_hosts: Annotated[
        list[str],
        doc(
            "accepted names in the Host header, besides loopback names if it listens on loopback; *.example.com for "
            "subdomains, * for any; repeatable. Default: loopback names on loopback, any elsewhere"
        ),
    ] = []
    allowed_origins: Annotated[
        list[str],
        doc("CORS: allowed origin; * for all; repeatable, or a JSON list"),
    ] = []
    allowed_methods: Annotated[list[str], doc("CORS: allowed methods; * or none given: all")] = []
    allowed_headers: Annotated[list[str], doc("CORS: allowed request headers; * or none given: any")] = []
    allow_credentials: Annotated[bool, doc("CORS: allow credentials")] = False

    reasoning_parser: Annotated[
        str | None, doc("how models mark reasoning: qwen3, deepseek_r1, ..., or none; default: by the chat template")
    ] = None
    tool_call_parser: Annotated[
        str | None,
        doc("how models write tool calls: hermes, llama3_json, ..., or none; default: by the chat template"),
    ] = None
    enable_auto_tool_choice: Annotated[
        bool, doc("models decide whether to call tools; otherwise tools need tool_choice required or a function")
    ] = True

    log_level: Annotated[
        Literal["error", "warning", "info", "debug"],
        doc(
            "info: a line per request with its id and client address; debug: also probes, reasons of refusals, and the "
            "engine's steps per request"
        ),
    ] = "warning"

    log_format: Annotated[Literal["text", "json"], doc("json: one object per line, with the request id")] = "text"
    status_interval: Annotated[float, doc("seconds between status lines in the log; 0: none")] = 10.0
    otlp_traces_endpoint: Annotated[str | None, doc("endpoint for traces, OTLP over HTTP; needs the extra otel")] = None

    max_queued_requests: Annotated[
        int, doc("maximum waiting prompts; more get 429, or 400 if one request has more")
    ] = 1024
    max_queued_tokens: Annotated[int, doc("maximum tokens of waiting prompts; more get 429")] = 2**22
    request_timeout: Annotated[
        float | None, doc("deadline of a request in seconds; X-Request-Timeout sets a shorter one")
    ] = None
    stream_interval: Annotated[
        int, doc("tokens per stream event after the first; larger values cost the front end less")
    ] = 1
    stream_keep_alive: Annotated[
        float, doc("seconds without events after which a stream sends a comment to keep it open; 0: never")
    ] = 15.0
    drain_timeout: Annotated[float, doc("seconds that running requests may continue after SIGTERM")] = 30.0
    watchdog_timeout: Annotated[
        float, doc("seconds without progress of a busy engine after which /health is 503; 0: off")
    ] = 300.0

    max_body_bytes: Annotated[int, doc("maximum bytes of a request body")] = 2**24
    max_bodies_bytes: Annotated[int, doc("maximum bytes of all bodies being read by one front end; more get 429")] = (
        2**28
    )
    body_timeout: Annotated[float, doc("seconds for a request body to arrive, plus one second per 16 KiB received")] = (
        30.0
    )
    max_stored_responses: Annotated[
        int, doc("responses of /v1/responses that the server keeps in memory, the last used; 0: none")
    ] = 1024
    max_stored_response_bytes: Annotated[int, doc("maximum bytes of all of them")] = 2**26
    batch_dir: Annotated[
        str | None, doc("folder of the store of /v1/files and /v1/batches, created if needed; none: both are disabled")
    ] = None
    max_file_bytes: Annotated[int, doc("maximum bytes of an upload to /v1/files")] = 2**27
    max_store_bytes: Annotated[
        int, doc("maximum bytes of all stored files and batch results; with several API keys each has an equal share")
    ] = 2**32
    max_header_bytes: Annotated[int, doc("maximum bytes of request line and headers")] = 2**16
    max_answer_bytes: Annotated[
        int,
        doc("maximum bytes of arrays (before JSON encoding), logprobs (64 bytes each) and token ids in one answer"),
    ] = 2**27
    max_inputs: Annotated[int, doc("maximum prompts per request")] = 1024
    max_n: Annotated[int, doc("maximum samples per prompt")] = 128
    max_samples: Annotated[int, doc("maximum samples per request: prompts times n")] = 1024
    max_logprobs: Annotated[int, doc("maximum logprobs per token")] = 20
    max_stop: Annotated[int, doc("maximum stop strings, stop tokens, bad words or logprob token ids per request")] = 128
    max_stop_chars: Annotated[int, doc("maximum characters of a stop string or bad word")] = 1024
    max_bias: Annotated[int, doc("maximum entries of logit_bias")] = 1024
    max_salt_chars: Annotated[int, doc("maximum characters of a cache salt")] = 256
