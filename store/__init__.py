"""Layer sets, plans, trials and cost profiles in SQL; rows never leave this package."""

from .database import as_url, default_url
from .published import import_file
from .store import Store

__all__ = ["Store", "as_url", "default_url", "import_file"]
