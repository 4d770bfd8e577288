"""A client's streams."""

import random

import pytest

from ps.client.streams import Streams
from ps.lines.calls import BrokenLineError


def test_connecting_draws_from_nobody_elses_generator() -> None:
    """A model that draws from Python's random is refused: streams are made beside its forward."""
    made = 0

    def make():
        nonlocal made
        made += 1
        raise OSError("nobody listens")

    streams, before = Streams(make), random.getstate()
    with pytest.raises(BrokenLineError):
        streams.call(1, b"", 1.0)
    streams.close()
    assert made == 1
    assert random.getstate() == before
