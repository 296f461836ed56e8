"""Access control: this machine's own browser at this address, or any client with the token; and security headers."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from http.cookies import CookieError, SimpleCookie

COOKIE = "meshwright"
_ONCE = ("host", "origin", "sec-fetch-site", "cookie", "content-type", "content-length", "transfer-encoding")
HEADERS = {
    # Only our own script files, no inline scripts; nothing from other origins; no framing by other pages.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Guard:
    """The rules of one server."""

    port: int
    host: str = "127.0.0.1"
    token: str | None = None
    """Required from every client if set."""

    def refusal(self, given: Sequence[tuple[str, str]]) -> str | None:
        """Why a request with these headers is refused, or None; the token is checked separately."""
        names = [name.lower() for name, _ in given]
        for name in _ONCE:
            if names.count(name) > 1:
                return f"a request must have one {name} header"  # readers disagree about which of two counts
        headers = {name.lower(): value for name, value in given}
        host = headers.get("host", "")
        if not host:
            return "a request must have a host header"
        # A foreign name that was made to resolve to this machine (DNS rebinding) is not one of ours.
        if self.token is None and host not in self._own_hosts():
            return "this server answers only at its own address"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return "requests from other pages are not answered"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return "requests from other pages are not answered"
        return None

    def knows_token(self, headers: Message, token: str | None) -> bool | None:
        """Whether a request's URL or cookie has the token, True if none is needed; None if the request has no token."""
        if self.token is None:
            return True
        cookie = _cookie(headers)
        if token is None and cookie is None:
            return None
        return self._knows(token) or self._knows(cookie)

    def _own_hosts(self) -> set[str]:
        return {f"{name}:{self.port}" for name in ("127.0.0.1", "localhost", self.host)}

    def _knows(self, given: str | None) -> bool:
        return given is not None and self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())


def _cookie(headers: Message) -> str | None:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value
