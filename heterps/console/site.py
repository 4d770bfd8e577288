"""The console of one scheduler: what its pages are made from."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from heterps.console.guard import COOKIE, Sessions
from heterps.console.traffic import Traffic

if TYPE_CHECKING:
    from heterps.home.target import Target


_MOST_BODY = 64 << 10


@dataclass(slots=True)
class Console:
    """What the pages are made from.

    Args:
        target: the scheduler.
        secure: whether browsers reach us over TLS.
    """

    target: "Target"
    sessions: Sessions
    traffic: Traffic
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
            "signed_in": self.sessions.asks and COOKIE in request.cookies,
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
