"""How far the reading of weights is: transformers' own progress bar, told in words instead of drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from time import monotonic
from typing import Any

SECONDS = 1.0  # between two words about a load


@contextmanager
def telling(step: Callable[[str], None], doing: str) -> Iterator[None]:
    """While a model is loaded, tell `step` "`doing`, 40 % of the weights" about every second."""
    from transformers.utils import logging

    def bar(_factory: Any, args: tuple[Any, ...], options: dict[str, Any]) -> _Bar:
        return _Bar(step, doing, *args, **options)

    before = logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


class _Bar:
    """As much of tqdm as transformers uses."""

    def __init__(
        self,
        step: Callable[[str], None],
        doing: str,
        iterable: Iterable[Any] = (),
        total: int | None = None,
        **_options: Any,
    ) -> None:
        self._step, self._doing, self._items = step, doing, iterable
        self._total = total if total is not None else (len(iterable) if isinstance(iterable, Sized) else 0)
        self._done = 0
        self._told = monotonic()

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was opened."""

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args, **_options: None  # set_postfix, close and the like only draw

    def update(self, n: int = 1) -> None:
        """`n` more of `total` are there."""
        self._done += n
        if self._total and monotonic() - self._told >= SECONDS:
            self._told = monotonic()
            self._step(f"{self._doing}, {100 * self._done // self._total} % of the weights")
