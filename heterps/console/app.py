"""The pages by their addresses, and what every page has in common."""

import logging
from functools import cache
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from heterps.console import routes
from heterps.console.attempts import TooManyError
from heterps.console.guard import COOKIE, SESSION_S, Guard, client_of, local_path
from heterps.console.site import Console
from heterps.errors import (
    ForbiddenError,
    HeterpsError,
    TokenRefusedError,
    UnknownJobError,
    UnreachableError,
)
from heterps.page.document import style
from scheduler.problem.fields import InputError

_log = logging.getLogger("heterps.console")
_STATIC = {
    "console.js": "text/javascript; charset=utf-8",
    "console.css": "text/css; charset=utf-8",
    "mark.svg": "image/svg+xml",
}


def make_app(console: Console, loopback: bool) -> FastAPI:
    """The application, with its guard in front.

    Args:
        loopback: whether only this machine can reach it.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, sessions=console.sessions, loopback=loopback)
    _static(app)
    _login(app, console)
    routes.add(app, console)

    def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, UnknownJobError):
            return console.problem(request, 404, "No such job", str(error))
        if isinstance(error, TokenRefusedError) and console.sessions.asks:
            console.sessions.end(request.cookies.get(COOKIE, ""))
            return RedirectResponse("/login", 303)
        if isinstance(error, ForbiddenError):
            return console.problem(request, 403, "Your token may not do that", str(error))
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
        if sessions.knows(request) is not None:
            return RedirectResponse(local_path(next), 303)
        return console.page(request, "login.html", problem="", next=local_path(next))

    @app.post("/login")
    async def enter(request: Request) -> Response:
        form = await console.form(request)
        if form is None:
            return console.problem(request, 403, "Refused", "The form is not one of ours.")
        goal = local_path(form.get("next", ["/"])[0])
        try:
            shown = form.get("token", [""])[0].strip()
            visitor = await run_in_threadpool(sessions.enter, shown, client_of(request))
        except TooManyError as error:
            told = f"Too many wrong tokens came from this address. Try again in {error.wait_s} s."
            refused = console.page(request, "login.html", 429, problem=told, next=goal)
            refused.headers["retry-after"] = str(error.wait_s)
            return refused
        except HeterpsError as error:
            _log.warning("%s", error)  # a stranger is not told where it should be
            told = "The scheduler does not answer. Try again later."
            return console.page(request, "login.html", 503, problem=told, next=goal)
        if visitor is None:
            told = "That token opens nothing here: it is wrong, was revoked or has expired."
            return console.page(request, "login.html", 401, problem=told, next=goal)
        answer = RedirectResponse(goal, 303)
        answer.set_cookie(
            COOKIE,
            sessions.begin(visitor),
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
