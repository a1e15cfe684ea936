"""Refusal of requests that do not come from the app's own page."""

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

HOST = re.compile(r"(?:\[(?P<address>[^\]]*)\]|(?P<name>[^:]*))(?::\d+)?")  # IPv6 addresses are in brackets


class KnownHosts:
    """ASGI middleware that refuses requests with an unknown Host header, and requests of other web sites.

    Another web site could otherwise let its own name point to this machine and read the app's answers (DNS rebinding),
    or send uploads to the app. IP addresses are allowed as hosts, because a web site can only redirect its name.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self.app = app
        self.names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self.is_known(host):
            text = f"unknown host; expected {' or '.join(sorted(self.names))}; start the app with --host to use another"
            await PlainTextResponse(text, status_code=403)(scope, receive, send)
        elif origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            text = "a request of another web site; open the app itself"
            await PlainTextResponse(text, status_code=403)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def is_known(self, header: str) -> bool:
        """Return whether a Host header, a name with an optional port, is allowed."""
        found = HOST.fullmatch(header.lower())
        return found is not None and (found["name"] in self.names or _is_ip_address(found["address"] or found["name"]))


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
