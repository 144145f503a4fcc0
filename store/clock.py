"""The database's own clock: leases are compared by it alone, so that the clocks of workers may differ."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Double
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class clock_s(FunctionElement[float]):
    """Seconds since 1970, with fractions, at the moment the statement runs."""

    name = "clock_s"
    type = Double()
    inherit_cache = True


@compiles(clock_s, "sqlite")
def _sqlite(element: clock_s, compiler: Any, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(clock_s, "postgresql")
def _postgresql(element: clock_s, compiler: Any, **options: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"
