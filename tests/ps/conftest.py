from collections.abc import Iterator

import pytest

from ps import LocalShards, ParameterClient


@pytest.fixture(scope="session")
def shards() -> Iterator[LocalShards]:
    """Three shards that no test harms; tests use tables of their own names."""
    with LocalShards(3) as running:
        yield running


@pytest.fixture
def client(shards: LocalShards) -> Iterator[ParameterClient]:
    with ParameterClient(shards.addresses, timeout_s=20) as connected:
        yield connected
