"""The pages by their addresses, and what every page has in common."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined

from heterps.client import Client
from heterps.console.attempts import TooManyError
from heterps.console.guard import COOKIE, SESSION_S, Guard, Sessions, client_of, local_path
from heterps.console.known import Known
from heterps.console.traffic import Traffic
from heterps.errors import HeterpsError, UnknownJobError, UnreachableError
from heterps.page.document import style
from scheduler.fields import InputError

if TYPE_CHECKING:
    from heterps.target import Target

_MOST_BODY = 64 << 10
_STATIC = {
    "console.js": "text/javascript; charset=utf-8",
    "console.css": "text/css; charset=utf-8",
    "mark.svg": "image/svg+xml",
}


@dataclass(slots=True)
class Console:
    """What the pages are made from.

    Args:
        target: the scheduler.
        connect: makes one more connection to it.
        secure: whether browsers reach us over TLS.
    """

    target: "Target"
    client: Client
    connect: Callable[[], Client]
    sessions: Sessions
    traffic: Traffic
    known: Known
    secure: bool
    _pages: Environment = field(
        default_factory=lambda: Environment(
            loader=PackageLoader("heterps.console"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
    )

    def page(
        self, request: Request, name: str, code: int = 200, done: bool = False, **values: Any
    ) -> HTMLResponse:
        """Fill in a template; only its living part where the page's script asks for that.

        Args:
            done: whether it will not change any more.
        """
        template = self._pages.get_template(name)
        values |= {
            "path": request.url.path,
            "scheduler": str(self.target),
            "form_key": self.sessions.form_key(request.cookies.get(COOKIE, "")),
            "signed_in": self.sessions.token is not None and COOKIE in request.cookies,
            "done": done,
        }
        headers = {"x-done": "1"} if done else {}
        if request.query_params.get("part") == "live" and "live" in template.blocks:
            block = template.blocks["live"](template.new_context(values))
            return HTMLResponse("".join(block), code, headers)
        return HTMLResponse(template.render(values), code, headers)

    async def form(self, request: Request) -> dict[str, list[str]] | None:
        """A form that was posted; None where it is not one of ours."""
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _MOST_BODY:
                return None
        fields = parse_qs(body.decode(errors="replace"), keep_blank_values=True)
        shown = fields.get("form_key", [""])[0]
        ours = self.sessions.accepts(request.cookies.get(COOKIE, ""), shown)
        return fields if ours else None

    def problem(self, request: Request, code: int, title: str, text: str) -> HTMLResponse:
        """A page that says what went wrong."""
        return self.page(request, "problem.html", code, title=title, text=text)


def make_app(console: Console, loopback: bool) -> FastAPI:
    """The application, with its guard in front.

    Args:
        loopback: whether only this machine can reach it.
    """
    from heterps.console import routes

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, sessions=console.sessions, loopback=loopback)
    _static(app)
    _login(app, console)
    routes.add(app, console)

    def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, UnknownJobError):
            return console.problem(request, 404, "No such job", str(error))
        if isinstance(error, UnreachableError):
            return console.problem(request, 503, "The scheduler does not answer", str(error))
        return console.problem(request, 400, "That did not work", str(error))

    def missing(request: Request, error: Exception) -> Response:
        return console.problem(request, 404, "No such page", f"There is no {request.url.path}.")

    app.add_exception_handler(HeterpsError, failed)
    app.add_exception_handler(InputError, failed)
    app.add_exception_handler(404, missing)
    return app


def _static(app: FastAPI) -> None:
    @app.get("/static/{name}")
    def static(name: str) -> Response:
        fresh = {"cache-control": "no-cache"}
        if name == "page.css":
            return Response(style(), media_type="text/css; charset=utf-8", headers=fresh)
        if name not in _STATIC:
            return Response(status_code=404)
        return Response(_read(name), media_type=_STATIC[name], headers=fresh)

    @app.get("/favicon.ico")
    def favicon() -> Response:
        return Response(_read("mark.svg"), media_type=_STATIC["mark.svg"])


def _login(app: FastAPI, console: Console) -> None:
    sessions = console.sessions

    @app.get("/login")
    def login(request: Request, next: str = "/") -> Response:
        if sessions.knows(request):
            return RedirectResponse(local_path(next), 303)
        return console.page(request, "login.html", problem="", next=local_path(next))

    @app.post("/login")
    async def enter(request: Request) -> Response:
        form = await console.form(request)
        if form is None:
            return console.problem(request, 403, "Refused", "The form is not one of ours.")
        goal = local_path(form.get("next", ["/"])[0])
        try:
            right = sessions.matches(form.get("token", [""])[0].strip(), client_of(request))
        except TooManyError as error:
            told = f"Too many wrong tokens came from this address. Try again in {error.wait_s} s."
            refused = console.page(request, "login.html", 429, problem=told, next=goal)
            refused.headers["retry-after"] = str(error.wait_s)
            return refused
        if not right:
            told = "That is not the token of this cluster."
            return console.page(request, "login.html", 401, problem=told, next=goal)
        answer = RedirectResponse(goal, 303)
        answer.set_cookie(
            COOKIE,
            sessions.begin(),
            max_age=int(SESSION_S),
            httponly=True,
            samesite="strict",
            secure=console.secure,
        )
        return answer

    @app.post("/logout")
    async def leave(request: Request) -> Response:
        if await console.form(request) is None:
            return console.problem(request, 403, "Refused", "The form is not one of ours.")
        sessions.end(request.cookies.get(COOKIE, ""))
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(COOKIE)
        return answer


@cache
def _read(name: str) -> bytes:
    return (files("heterps.console") / "static" / name).read_bytes()
