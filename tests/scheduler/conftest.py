"""What tests of several of the scheduler's parts start from."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.state.store import Store
from tests.valkey import Valkey


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store of the test's own, on a real server."""
    with Valkey(tmp_path / "redis") as server:
        made = Store(server.url)
        yield made
        made.close()
