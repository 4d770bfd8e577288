"""How often tests of chance try: a few times always, more in `make test-all` and `make soak`."""

import os
from typing import Any

import pytest

_SOAK = int(os.environ.get("HETERPS_SOAK", "1"))


def rounds(name: str, few: int, many: int) -> pytest.MarkDecorator:
    """Parametrize a test by its number of rounds: `few` in every run, `many` in exhaustive ones."""
    marks: list[Any] = [pytest.mark.exhaustive, pytest.mark.soak]
    return pytest.mark.parametrize(name, [few, pytest.param(many * _SOAK, marks=marks)])
