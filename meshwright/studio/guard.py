"""Who may ask: this machine's own browser at this address, or whoever has the token; and what pages may do."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

COOKIE = "meshwright"
HEADERS = {
    # No script but our own files, no inline one; nothing from elsewhere; not inside another page.
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
    """Needed by everyone where it is given."""

    def refusal(self, headers: Mapping[str, str], token: str | None) -> str | None:
        """Why a request is refused, or None; header names are in small letters, `token` is from its address."""
        host = headers.get("host", "")
        # A name that some page let point to this machine (DNS rebinding) is not one of ours.
        if self.token is None and host not in self._own_hosts():
            return "this server answers at its own address only"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return "requests from other pages are not answered"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return "requests from other pages are not answered"
        if self.token is not None and not self._knows(token) and not self._knows(_cookie(headers)):
            return "the token is missing or wrong; open the address that `meshwright studio` printed"
        return None

    def _own_hosts(self) -> set[str]:
        return {f"{name}:{self.port}" for name in ("127.0.0.1", "localhost", self.host)}

    def _knows(self, given: str | None) -> bool:
        return given is not None and self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())


def _cookie(headers: Mapping[str, str]) -> str | None:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value
