"""The search strategies by name, found in the files of this package: each lists its own in `STRATEGIES`.

The front doors read the table, so the files import numpy inside functions only.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ...core.errors import look_up
from .base import Proposal, SearchProblem, Strategy, StrategyInfo, Study, StudyKind

__all__ = [
    "MAX_CANDIDATES",
    "SIZE_CHOOSING",
    "STRATEGIES",
    "Proposal",
    "SearchProblem",
    "Strategy",
    "StrategyInfo",
    "Study",
    "StudyKind",
    "strategy_info",
]

MAX_CANDIDATES = 96  # Maximum candidates scored by a strategy that chooses the number of skipped sub-layers.

STRATEGIES: dict[str, StrategyInfo] = {}
for _file in iter_modules(__path__):
    STRATEGIES |= getattr(import_module(f"{__name__}.{_file.name}"), "STRATEGIES", {})
# Strategies that choose the number of skipped sub-layers come last.
STRATEGIES = dict(sorted(STRATEGIES.items(), key=lambda row: row[1].chooses_size))
SIZE_CHOOSING = tuple(name for name, info in STRATEGIES.items() if info.chooses_size)


def strategy_info(name: str) -> StrategyInfo:
    """Find a strategy's row.

    Raises: SettingsError: there is no strategy of that name.
    """
    return look_up("strategy", name, STRATEGIES)
