"""Loads the certificate of an https server."""

from __future__ import annotations

import ssl
from typing import NoReturn

from slipstream.base.errors import InvalidOption
from slipstream.serve.http.settings import ServerSettings

HANDSHAKE_SECONDS = 15.0  # a connection with a longer handshake is closed


def server_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Returns None for a plain HTTP server. Raises InvalidOption for files that cannot be used."""
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise InvalidOption("ssl_keyfile is given without ssl_certfile; give the certificate too")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 and up
    context.set_alpn_protocols(["http/1.1"])
    shown = f"ssl_certfile {settings.ssl_certfile}"
    if settings.ssl_keyfile is not None:
        shown += f" and ssl_keyfile {settings.ssl_keyfile}"
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=_no_password)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or str(error)
        raise InvalidOption(f"{shown} cannot be used: {reason}; give a certificate and its key in PEM format") from None
    return context


def _no_password() -> NoReturn:
    """Replaces OpenSSL's prompt at the terminal, which would block a server without one."""
    raise InvalidOption("ssl_keyfile is encrypted; give the key without a password, in a file that others cannot read")
