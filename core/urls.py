"""URLs as errors, logs and hints may show them: without a password."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

SECRET_OPTION = re.compile(
    r"([?&](?:ssl)?password=)[^&#]*", re.IGNORECASE
)  # another way to write a password into a URL


def safe_url(url: str) -> str:
    """The URL, or path, without its password."""
    url = SECRET_OPTION.sub(r"\1***", url)
    if "@" not in url or "://" not in url:
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(unreadable URL)"  # it may hold a password
    user, colon, _ = parts.netloc.rpartition("@")[0].partition(":")
    return parts._replace(netloc=f"{user}:***@{parts.netloc.rpartition('@')[2]}").geturl() if colon else url
