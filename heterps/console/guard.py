"""Who may look and who may act: hosts, sessions, tokens, and what a browser is told to refuse.

On loopback a page of any other site could reach us through the user's own browser, so the name in
the Host header must be loopback's (against DNS rebinding), and whatever acts or costs time must
come from our own pages.
"""

import hashlib
import hmac
import logging
import secrets
import threading
import time
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chassis.security import is_loopback
from heterps.console.attempts import Attempts, TooManyError
from heterps.console.visitor import Visitor, Visitors
from heterps.errors import HeterpsError

_log = logging.getLogger("heterps.console")
COOKIE = "heterps_session"
SESSION_S = 12 * 3600.0
_MOST_SESSIONS = 1000
_SAFE = ("GET", "HEAD")
_OPEN = ("/login", "/static/")  # what a stranger may ask for
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class _Session:
    end: float  # time.monotonic()
    visitor: Visitor


@dataclass(slots=True)
class Sessions:
    """Who has shown a token. Ids are kept as digests, and forgotten with the process.

    Args:
        asks: whether visitors must show one; otherwise everybody may look.
    """

    visitors: Visitors
    asks: bool
    _attempts: Attempts = field(default_factory=Attempts)
    _begun: dict[str, _Session] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def enter(self, shown: str, client: str) -> Visitor | None:
        """Who shows this token; None where it opens nothing.

        Args:
            client: the address that it came from.

        Raises:
            TooManyError: too many wrong ones came from there.
            HeterpsError: only the scheduler knows, and it does not answer.
        """
        return self._attempts.check(client, lambda: self.visitors.of(shown))

    def begin(self, visitor: Visitor) -> str:
        """A new session's id."""
        now = time.monotonic()
        session = secrets.token_urlsafe(32)
        with self._lock:
            self._begun = {key: one for key, one in self._begun.items() if one.end > now}
            while len(self._begun) >= _MOST_SESSIONS:
                del self._begun[next(iter(self._begun))]
            self._begun[_digest(session)] = _Session(now + SESSION_S, visitor)
        return session

    def end(self, session: str) -> None:
        """Forget a session."""
        with self._lock:
            self._begun.pop(_digest(session), None)

    def knows(self, request: Request) -> Visitor | None:
        """Who sends a request, where they have shown a token or none is asked for."""
        if not self.asks:
            return self.visitors.own
        with self._lock:
            found = self._begun.get(_digest(request.cookies.get(COOKIE, "")))
        return found.visitor if found is not None and found.end > time.monotonic() else None

    def admit(self, request: Request) -> Visitor | None:
        """The same, or who shows one now.

        Raises:
            TooManyError, HeterpsError: as `enter`.
        """
        if (known := self.knows(request)) is not None:
            return known
        kind, _, shown = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return None
        return self.enter(shown.strip(), client_of(request))

    def form_key(self, session: str) -> str:
        """What a form of this session carries, which no other site can know."""
        return hmac.new(self._secret, session.encode(), hashlib.sha256).hexdigest()

    def accepts(self, session: str, form_key: str) -> bool:
        """Whether a form is one of ours."""
        return hmac.compare_digest(
            self.form_key(session).encode(), form_key.encode(errors="replace")
        )


class Guard:
    """The middleware in front of every page.

    Args:
        loopback: whether we listen on loopback alone.
    """

    def __init__(self, app: ASGIApp, sessions: Sessions, loopback: bool) -> None:
        self._app = app
        self._sessions = sessions
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = await self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, told)

    async def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if self._loopback and not is_loopback(_hostname(host)):
            return PlainTextResponse(
                f"Host {host!r}: expected 127.0.0.1 or localhost, as the console listens there "
                "alone\n",
                421,
            )
        if request.method not in _SAFE and not from_here(request):
            return PlainTextResponse("the request comes from another site; it was refused\n", 403)
        path = request.url.path
        try:
            if path.startswith(_OPEN):
                return None
            visitor = await run_in_threadpool(self._sessions.admit, request)
        except TooManyError as error:
            return PlainTextResponse(f"{error}\n", 429, {"retry-after": str(error.wait_s)})
        except HeterpsError as error:
            _log.warning("%s", error)  # a stranger is not told where it should be
            return PlainTextResponse("the scheduler does not answer; try again later\n", 503)
        if visitor is not None:
            request.state.visitor = visitor
            return None
        if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
            query = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(f"/login?next={quote(path + query, safe='')}", 303)
        return PlainTextResponse(
            "the token is missing or wrong; send it as `Authorization: Bearer TOKEN`\n",
            401,
            {"www-authenticate": "Bearer"},
        )


def client_of(request: Request) -> str:
    """The address that a request came from."""
    return request.client.host if request.client is not None else ""


def from_here(request: Request) -> bool:
    """Whether a request was not sent by a page of another site."""
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host", "")


def local_path(path: str) -> str:
    """Where to go after a login: a path of ours, whatever somebody wrote into the link."""
    plain = path.startswith("/") and path[1:2] not in ("/", "\\")
    return path if plain and path.isprintable() else "/"


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _digest(session: str) -> str:
    return hashlib.sha256(session.encode()).hexdigest()
