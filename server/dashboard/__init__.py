"""The dashboard: pages rendered on the server, which work without scripts; their live parts are sent as HTML events.

`shown_page` builds a page and its live part from one function; other pages are routes of `pages()` that end with
`page`. Nothing is loaded from another host. If API keys are set, a page asks once for one of them: a signed cookie
remembers its owner, as long as the server has that key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from inspect import iscoroutinefunction, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Depends, FastAPI, Form, Query, Request
from fastapi.routing import APIRoute
from itsdangerous import BadSignature, URLSafeTimedSerializer
from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_environment
from jinja2.filters import do_truncate
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from ...core.errors import SwiftoptError
from ...core.types import origin_words
from ..errors import Refused, refused_at, refused_by
from ..middleware import Shared, is_foreign, state_of
from ..settings import GUARDED, KeyRing

HERE = Path(__file__).parent
STATIC = {path.name: path for path in (HERE / "static").iterdir()}
PAGES = (
    ("/", "Overview"),
    ("/requests", "Requests"),
    ("/plans", "Plans"),
    ("/searches", "Searches"),
    ("/jobs", "Jobs"),
    ("/traffic", "Traffic"),
    ("/playground", "Playground"),
)
COOKIE = "swiftopt_session"
SESSION_S = 12 * 3600  # Lifetime of a session, in seconds.
LIVE_S = 2.0  # Seconds between two updates of a live part of a page.
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
# Signs sessions if no API keys are set; such a server accepts only local connections.
_secret = secrets.token_hex(32)


# --- sessions


@dataclass(frozen=True, slots=True)
class DashboardSession:
    """A log-in: the name of its key (None without keys); its forms carry `token`.

    A `cookie` that is not None is set with the next page.
    """

    owner: str | None
    token: str
    cookie: str | None = None


def _session(keys: KeyRing, owner: str | None, signed_nonce: str | None = None) -> DashboardSession:
    """Return the session whose cookie has the signed nonce; None: a new one.

    Cookies are signed with the hash of the owner's key, so that removing a key ends its sessions.

    Raises: BadSignature: the nonce is signed with another key, or has expired.
    """
    key = keys.find(owner)
    secret = _secret if key is None else key.hashed
    signer = URLSafeTimedSerializer(secret, salt="swiftopt session")
    nonce = secrets.token_urlsafe(16) if signed_nonce is None else str(signer.loads(signed_nonce, max_age=SESSION_S))
    token = hmac.new(secret.encode(), f"swiftopt form {nonce}".encode(), "sha256").hexdigest()
    return DashboardSession(owner, token, f"{owner or ''}:{signer.dumps(nonce)}" if signed_nonce is None else None)


def _known_session(request: Request, keys: KeyRing) -> DashboardSession | None:
    """Return the session of the request's cookie, if it is valid."""
    name, _, signed_nonce = request.cookies.get(COOKIE, "").partition(":")
    if (keys.find(name) is None) == keys.required:
        return None
    try:
        return _session(keys, name or None, signed_nonce)
    except BadSignature:
        return None


def session_of(request: Request, app: Shared) -> DashboardSession:
    """Return the session of a request; a new one if no keys are set.

    Raises: Refused: 401, if keys are set and the request has no valid session.
    """
    keys = app.settings.keys
    if (session := _known_session(request, keys)) is not None:
        return session
    if keys.required:
        raise Refused(401, "unauthorised", "log in with one of this server's keys")
    return _session(keys, None)


def check_form(request: Request, app: Shared, token: Annotated[str, Form()] = "") -> DashboardSession:
    """Return the session that sent a form.

    Raises: Refused: 401 as in `session_of`; 403: a page of another site, or of an earlier session, sent it.
    """
    session = session_of(request, app)
    is_own_token = hmac.compare_digest(token.encode(errors="replace"), session.token.encode())
    if is_foreign(request.headers) or not is_own_token:
        problem = "this form belongs to another session: reload the page, then send it again"
        raise Refused(403, "foreign-form", problem)
    return session


PageNumber = Annotated[int, Query(alias="page", ge=1, le=1_000_000)]  # Number of a list's page, from 1.
CurrentSession = Annotated[DashboardSession, Depends(session_of)]
FormSession = Annotated[DashboardSession, Depends(check_form)]


# --- pages


def pages_for_browsers(app: FastAPI) -> None:
    """Answer browsers with an error page at unknown addresses."""
    app.add_exception_handler(HTTPException, _unknown_address)


def _with_security_headers(response: Response) -> Response:
    """Set headers that forbid content from other hosts."""
    for name, header in HEADERS.items():
        response.headers.setdefault(name, header)
    return response


class PageRoute(APIRoute):
    """A route whose errors are HTML pages and whose responses forbid content from other hosts."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler with error pages and security headers added."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                response = await handle(request)
            except Exception as error:
                refusal = refused_by(error)
                if refusal.kind == "internal":
                    logger.exception("page=failed path=%s", request.url.path)
                response = await _error_page(request, refusal)
            return _with_security_headers(response)

        return guarded


async def _unknown_address(request: Request, error: Exception) -> Response:
    """At unknown addresses, answer browsers with a page; programs and API paths get the usual error."""
    refusal, path = refused_at(request, error), request.url.path
    is_known = isinstance(error, Refused) or refusal.status_code not in (404, 405) or path.startswith(GUARDED)
    if is_known or "text/html" not in request.headers.get("accept", ""):
        return refusal.response(path)
    keys = (await state_of(request)).settings.keys
    session = _known_session(request, keys) or (None if keys.required else _session(keys, None))
    detail = f"There is no page at {path[:200]}: choose one of those below."
    response = page(request, session, "unknown.html", refusal.status_code, detail=detail)
    response.headers.update(refusal.headers or {})
    return _with_security_headers(response)


async def _error_page(request: Request, refusal: Refused) -> Response:
    if refusal.status_code == 401 and request.method == "GET" and not request.url.path.startswith("/live/"):
        plan_address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/login?next={quote(plan_address)}", 303)
    session = _known_session(request, (await state_of(request)).settings.keys)
    return page(request, session, "problem.html", refusal.status_code, title="Not possible", detail=refusal.detail)


def pages() -> APIRouter:
    """Return an empty router for pages, which are not part of the OpenAPI document."""
    return APIRouter(route_class=PageRoute, include_in_schema=False, default_response_class=HTMLResponse)


def page(request: Request, session: DashboardSession | None, name: str, status: int = 200, **values: Any) -> Response:
    """Return a page rendered from a template."""
    html = render(name, path=request.url.path, pages=PAGES, session=session, **values)
    response = HTMLResponse(html, status)
    _set_cookie(request, response, session)
    return response


def render(name: str, **values: Any) -> str:
    """Return the HTML of a template."""
    return templates.get_template(name).render(values)


def _set_cookie(request: Request, response: Response, session: DashboardSession | None) -> None:
    if session is not None and session.cookie is not None:
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, session.cookie, SESSION_S, httponly=True, samesite="strict", secure=secure)


def live(
    render_part: Callable[[], Awaitable[str]], period_s: float = LIVE_S, is_over: Callable[[], bool] = lambda: False
) -> Response:
    """Send a page's live part whenever it has changed, or the error that prevents its rendering.

    When `is_over` returns true, the part is sent a last time, followed by the event "over".
    """

    async def events() -> AsyncIterator[ServerSentEvent]:
        last_html = ""
        while True:
            is_last = is_over()
            try:
                html = await render_part()
            except SwiftoptError as error:
                html = render("problem_part.html", detail=str(error))
            if html != last_html:
                last_html = html
                yield ServerSentEvent(html)
            if is_last:
                yield ServerSentEvent("", event="over")
                return
            await asyncio.sleep(period_s)

    return EventSourceResponse(events(), ping=KEEP_ALIVE_S)


Values = Callable[[], Awaitable[dict[str, Any]]]
ValuesOf = TypeVar("ValuesOf", bound=Callable[..., Any])


def shown_page(
    router: APIRouter, path: str, name: str, live_s: float | None = None, live_path: str = ""
) -> Callable[[ValuesOf], ValuesOf]:
    """Add a page of the template `name` to a router, and with `live_s` its live part `name`_part at `/live` + path.

    The decorated function returns the values of both. Its parameters are those of the two routes, as FastAPI reads
    them. It is called for every update, `live_s` seconds after the last one, in a thread unless it is async.
    """

    def add(values_of: ValuesOf) -> ValuesOf:
        async def bound(**parameters: Any) -> Values:
            call: Any = values_of if iscoroutinefunction(values_of) else partial(run_in_threadpool, values_of)
            return partial(call, **parameters)

        bound.__signature__ = signature(values_of, eval_str=True)  # type: ignore[attr-defined]
        dependency = Depends(bound)

        @router.get(path)
        async def whole(request: Request, session: CurrentSession, values: Values = dependency) -> Response:
            return page(request, session, f"{name}.html", **await values())

        if live_s is None:
            return values_of

        @router.get(live_path or f"/live{path}")
        async def updates(session: CurrentSession, values: Values = dependency) -> Response:
            async def part() -> str:
                return render(f"{name}_part.html", session=session, **await values())

            return live(part, live_s)

        return values_of

    return add


# --- filters and globals of the templates


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Return a number with fixed decimals; a dash for None."""
    return "–" if value is None else f"{value:,.{digits}f}{unit}"


def percent(share: float | None, digits: int = 0) -> str:
    """Return a share in per cent; a dash for None."""
    return number(None if share is None else 100 * share, digits, " %")


def tok_s(value: float | None) -> str:
    """Return tokens per second; a dash for None."""
    return number(value, 1 if value is None or abs(value) >= 10 else 2)


def seconds(value: float | None) -> str:
    """Return a duration in the unit that suits it."""
    if value is None:
        return "–"
    for limit, unit_s, unit in ((0.1, 0.001, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if abs(value) < limit:
            return f"{value / unit_s:.3g} {unit}"
    return f"{value / 86_400:.3g} days"


def ago(time_s: float) -> str:
    """Return how long ago a time (seconds since 1970) was."""
    return f"{seconds(max(0.0, time.time() - time_s))} ago"


def moment(time_s: float) -> str:
    """Return a time (seconds since 1970) by the server's clock, with its date unless that is today."""
    then, now = time.localtime(time_s), time.localtime()
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%Y-%m-%d %H:%M", then)


@pass_environment
def truncate(environment: Environment, text: str, length: int, ending: str = "...") -> str:
    """Return the beginning of a text; it may be cut within a word, because a name can be one long word."""
    return do_truncate(environment, text, length, killwords=True, end=ending)


templates.filters |= {
    function.__name__: function for function in (number, percent, tok_s, origin_words, seconds, ago, moment, truncate)
}
templates.globals["static"] = {  # Static file -> URL with a hash of its content, so that browsers reload changed files.
    name: f"/static/{name}?{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}" for name, path in STATIC.items()
}.__getitem__


# --- files, log-in and log-out

router = pages()


@router.get("/static/{name}")
async def file(name: str) -> Response:
    """A file that pages load."""
    if name not in STATIC:
        raise Refused(404, "no-such-route", "there is no such file: reload the page")
    return FileResponse(STATIC[name], headers={"Cache-Control": "public, max-age=31536000, immutable"})


@router.get("/login")
async def login(request: Request, app: Shared, next: str = "/") -> Response:
    """The form that asks for a key."""
    if not app.settings.keys.required:
        return RedirectResponse("/", 303)
    return page(request, None, "login.html", next=_local(next), wrong=False)


@router.post("/login")
async def log_in(
    request: Request, app: Shared, key: Annotated[str, Form()], next: Annotated[str, Form()] = "/"
) -> Response:
    """Begin a session with a key."""
    caller = request.client.host if request.client else "local"
    app.logins.check(caller, "log-ins")
    app.logins.spend(caller)
    if is_foreign(request.headers):
        raise Refused(403, "foreign-origin", "a page of another site may not log you in: open this server's own page")
    owner = app.settings.keys.owner(key.strip())
    if owner is None:
        return page(request, None, "login.html", 401, next=_local(next), wrong=True)
    response = RedirectResponse(_local(next), 303)
    _set_cookie(request, response, _session(app.settings.keys, owner))
    return response


@router.post("/logout")
async def log_out(session: FormSession) -> Response:
    """End the session."""
    response = RedirectResponse("/login", 303)
    response.delete_cookie(COOKIE)
    return response


def _local(path: str) -> str:
    """Return a path of this server, "/" in place of anything else."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() else "/"
