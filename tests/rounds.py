"""What only `make test-all` tries, and how long `make soak` goes on."""

import os
from typing import Any

import pytest

_SOAK = int(os.environ.get("HETERPS_SOAK", "1"))


def more(*values: Any) -> list[Any]:
    """Parameters of exhaustive runs, beside those of every run."""
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def rounds(name: str, few: int, many: int) -> pytest.MarkDecorator:
    """Parametrize a test by its number of rounds: `few` in every run, `many` in exhaustive ones."""
    marks: list[Any] = [pytest.mark.exhaustive, pytest.mark.soak]
    return pytest.mark.parametrize(name, [few, pytest.param(many * _SOAK, marks=marks)])
