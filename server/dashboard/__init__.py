"""The dashboard: pages made on the server, which work without scripts; their live parts come as HTML over events.

A page is a route of `pages()` that ends with `page`; its live part is a template of its own, which the page includes
and `live` sends again whenever it has changed. Nothing is loaded from another host. Where API keys are set, a page
wants one of them once: a signed cookie remembers whose it was, as long as that key is one of the server's.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Form, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from itsdangerous import BadSignature, URLSafeTimedSerializer
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from ...core.errors import SwiftoptError
from ..middleware import is_foreign, too_many
from ..problems import Refused, refused_by
from ..settings import KeyRing
from ..state import LOGINS_PER_MIN, Shared, state_of

HERE = Path(__file__).parent
STATIC = {path.name: path for path in (HERE / "static").iterdir()}
PAGES = (
    ("/", "Overview"),
    ("/plans", "Plans"),
    ("/searches", "Searches"),
    ("/jobs", "Jobs"),
    ("/traffic", "Traffic"),
    ("/playground", "Playground"),
)
COOKIE = "swiftopt_session"
SESSION_S = 12 * 3600  # that a log-in holds
LIVE_S = 2.0  # between two looks at what a page shows
KEEP_ALIVE_S = 15
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}

logger = logging.getLogger(__name__)
templates = Environment(
    loader=FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_secret = secrets.token_hex(32)  # signs where no keys are set: such a server answers its own machine only


# --- who looks


@dataclass(frozen=True, slots=True)
class Visit:
    """Who looks at a page: the name of the key that was logged in with, None where no keys are set.

    Forms of the page carry `token`, which signs the session's `nonce`; its `cookie` is set with the next page where it
    is not None.
    """

    owner: str | None
    nonce: str
    token: str
    cookie: str | None = None


def _signer(keys: KeyRing, owner: str | None, purpose: str) -> URLSafeTimedSerializer:
    """Return what signs for a key's owner: with the key's hash, so that a key that is withdrawn ends its sessions."""
    return URLSafeTimedSerializer(keys.hashed(owner) or _secret, salt=f"swiftopt {purpose}")


def _begun(keys: KeyRing, owner: str | None) -> Visit:
    """Begin a session."""
    nonce = secrets.token_urlsafe(16)
    cookie = f"{owner or ''}:{_signer(keys, owner, 'session').dumps(nonce)}"
    return Visit(owner, nonce, _signer(keys, owner, "form").dumps(nonce), cookie)


def _going_on(request: Request, keys: KeyRing) -> Visit | None:
    """Return the session that a request belongs to, if there is one and it holds."""
    name, _, signed = request.cookies.get(COOKIE, "").partition(":")
    owner = name or None
    if (keys.hashed(owner) is None) == keys.required:
        return None
    try:
        nonce = str(_signer(keys, owner, "session").loads(signed, max_age=SESSION_S))
    except BadSignature:
        return None
    return Visit(owner, nonce, _signer(keys, owner, "form").dumps(nonce))


def visit_of(request: Request, app: Shared) -> Visit:
    """Return who looks at a page.

    Raises: Refused: 401, where keys are set and nobody has logged in.
    """
    keys = app.settings.keys
    if (visit := _going_on(request, keys)) is not None:
        return visit
    if keys.required:
        raise Refused(401, "unauthorised", "log in with one of this server's keys")
    return _begun(keys, None)


def check_form(request: Request, app: Shared, token: Annotated[str, Form()] = "") -> Visit:
    """Return who sent a form.

    Raises: Refused: 401 as `visit_of`; 403: a page of another site, or of an earlier session, has sent it.
    """
    keys, visit = app.settings.keys, visit_of(request, app)
    try:
        nonce = _signer(keys, visit.owner, "form").loads(token, max_age=SESSION_S)
    except BadSignature:
        nonce = None
    if is_foreign(request.headers) or nonce != visit.nonce:
        words = "this form is not of your present session: load the page again, then send it"
        raise Refused(403, "foreign-form", words)
    return visit


Visiting = Annotated[Visit, Depends(visit_of)]
Sent = Annotated[Visit, Depends(check_form)]


# --- pages


class PageRoute(APIRoute):
    """A route whose errors are pages, and whose responses may show nothing of other hosts."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, with that around it."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                response = await handle(request)
            except (SwiftoptError, RequestValidationError, HTTPException) as error:
                response = await _refusing(request, refused_by(error))
            except Exception as error:
                logger.exception("page=failed path=%s", request.url.path)
                response = await _refusing(request, refused_by(error))
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return guarded


async def _refusing(request: Request, refused: Refused) -> Response:
    if refused.status_code == 401 and request.method == "GET" and not request.url.path.startswith("/live/"):
        asked = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/login?next={quote(asked)}", 303)
    app = await state_of(request)
    visit = _going_on(request, app.settings.keys)
    return page(request, visit, "problem.html", refused.status_code, title="Not possible", detail=refused.detail)


def pages() -> APIRouter:
    """Return an empty router of pages, which the OpenAPI document leaves out."""
    return APIRouter(route_class=PageRoute, include_in_schema=False, default_response_class=HTMLResponse)


def page(request: Request, visit: Visit | None, name: str, status: int = 200, **values: Any) -> Response:
    """Return a page made of a template."""
    html = render(name, path=request.url.path, pages=PAGES, visit=visit, **values)
    response = HTMLResponse(html, status)
    if visit is not None and visit.cookie is not None:
        remember(request, response, visit.cookie)
    return response


def render(name: str, **values: Any) -> str:
    """Return the HTML of a template."""
    return templates.get_template(name).render(values)


def remember(request: Request, response: Response, cookie: str) -> None:
    """Set a session's cookie."""
    secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, cookie, SESSION_S, httponly=True, samesite="strict", secure=secure)


def live(
    part: Callable[[], Awaitable[str]], period_s: float = LIVE_S, is_over: Callable[[], bool] = lambda: False
) -> Response:
    """Send a page's live part whenever it has changed; what keeps it from being made is said in its place.

    Once `is_over`, the part is sent a last time, and the event "over" behind it.
    """

    async def events() -> AsyncIterator[ServerSentEvent]:
        shown = ""
        while True:
            is_last = is_over()
            try:
                html = await part()
            except SwiftoptError as error:
                html = render("problem_part.html", detail=str(error))
            if html != shown:
                shown = html
                yield ServerSentEvent(html)
            if is_last:
                yield ServerSentEvent("", event="over")
                return
            await asyncio.sleep(period_s)

    return EventSourceResponse(events(), ping=KEEP_ALIVE_S)


# --- words of the templates


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Return a figure with so many digits behind the point; a dash for none."""
    return "–" if value is None else f"{value:,.{digits}f}{unit}"


def seconds(value: float | None) -> str:
    """Return a duration in the unit that suits it."""
    if value is None:
        return "–"
    for limit, per, unit in ((0.1, 0.001, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if abs(value) < limit:
            return f"{value / per:.3g} {unit}"
    return f"{value / 86_400:.3g} days"


def ago(at: float) -> str:
    """Return how long ago a moment (seconds since 1970) was."""
    return f"{seconds(max(0.0, time.time() - at))} ago"


def moment(at: float) -> str:
    """Return a moment (seconds since 1970) of the server's clock, with its day where that is not today."""
    then, now = time.localtime(at), time.localtime()
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%Y-%m-%d %H:%M", then)


def static(name: str) -> str:
    """Return the address of a file, which changes with the file."""
    return f"/static/{name}?{hashlib.sha256(STATIC[name].read_bytes()).hexdigest()[:12]}"


templates.filters |= {"number": number, "seconds": seconds, "ago": ago, "moment": moment}
templates.globals["static"] = {name: static(name) for name in STATIC}.__getitem__


# --- what every page needs

router = pages()


@router.get("/static/{name}")
async def file(name: str) -> Response:
    """A file that pages load."""
    if name not in STATIC:
        raise Refused(404, "no-such-route", "there is no such file: load the page again")
    return FileResponse(STATIC[name], headers={"Cache-Control": "public, max-age=31536000, immutable"})


@router.get("/login")
async def login(request: Request, app: Shared, next: str = "/") -> Response:
    """The form that asks for a key."""
    if not app.settings.keys.required:
        return RedirectResponse("/", 303)
    return page(request, None, "login.html", next=_own(next), wrong=False)


@router.post("/login")
async def log_in(
    request: Request, app: Shared, key: Annotated[str, Form()], next: Annotated[str, Form()] = "/"
) -> Response:
    """Begin a session with a key."""
    caller = request.client.host if request.client else "local"
    if wait_s := app.logins.wait_s(caller):
        raise too_many(f"{LOGINS_PER_MIN} log-ins", wait_s)
    app.logins.spend(caller)
    if is_foreign(request.headers):
        raise Refused(403, "foreign-origin", "a page of another site may not log you in: open this server's own")
    owner = app.settings.keys.owner(key.strip())
    if owner is None:
        return page(request, None, "login.html", 401, next=_own(next), wrong=True)
    response = RedirectResponse(_own(next), 303)
    cookie = _begun(app.settings.keys, owner).cookie
    assert cookie is not None
    remember(request, response, cookie)
    return response


@router.post("/logout")
async def log_out(visit: Sent) -> Response:
    """End the session."""
    response = RedirectResponse("/login", 303)
    response.delete_cookie(COOKIE)
    return response


def _own(path: str) -> str:
    """Return a path of this server, "/" in place of anything else."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() else "/"
