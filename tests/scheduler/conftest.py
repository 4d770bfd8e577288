"""What tests of several of the scheduler's parts start from."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.state.redis_server import EmbeddedRedis
from scheduler.state.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store of the test's own, on a real server."""
    with EmbeddedRedis(tmp_path) as server:
        made = Store(server.url)
        yield made
        made.close()
