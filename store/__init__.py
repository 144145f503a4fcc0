"""Layer sets, plans, trials, cost profiles and jobs in SQL; rows never leave this package."""

from .database import as_url, default_url
from .store import LEASE_S, Jobs, Store
from .transitions import Claim

__all__ = ["LEASE_S", "Claim", "Jobs", "Store", "as_url", "default_url"]
