"""Query parameters of routes. No parameter is ignored: an unknown one is refused by name."""

from __future__ import annotations

from urllib.parse import parse_qsl

from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.request import Request


def query_of(request: Request, *names: str) -> dict[str, str]:
    """Returns the parameters of the query string. Raises for others than `names`."""
    found: dict[str, str] = {}
    for name, value in parse_qsl(request.query_string.decode("latin-1"), keep_blank_values=True):
        if name not in names:
            hint = f"give {', '.join(names)}" if names else "remove it"
            raise bad_request(f"there is no parameter {name[:100]}; {hint}", name[:100])
        found[name] = value
    return found


def limit_of(query: dict[str, str], most: int, default: int) -> int:
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise bad_request(f"limit is {text[:20]!r}; give 1 to {most}", "limit")
    return int(text)


def newest_first(query: dict[str, str]) -> bool:
    """The order of a list: desc, the default, or asc."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request(f"order is {order[:50]!r}; give asc or desc", "order")
    return order == "desc"
