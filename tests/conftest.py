"""What all tests share: GPU tests are left out in a sentence, and nothing touches the user's own folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` run where a CUDA device is."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device, which the test needs"))


@pytest.fixture(scope="session")
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The session's stand-in for the user's cache and data folders."""
    return tmp_path_factory.mktemp("swiftopt")


@pytest.fixture(scope="session", autouse=True)
def away_from_the_users_folders(own_folders: Path) -> Iterator[None]:
    """Send cache and database to a temporary folder, and keep the hub out of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWIFTOPT_CACHE_DIR", str(own_folders / "cache"))
        patch.setenv("SWIFTOPT_DATABASE_URL", f"sqlite:///{own_folders / 'swiftopt.db'}")
        patch.setenv("XDG_DATA_HOME", str(own_folders / "data"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield
