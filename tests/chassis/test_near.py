"""The nearest known name."""

import pytest

from chassis.near import did_you_mean, near_or_all, nearest

KNOWN = ["learning_rate", "Adagrad", "epsilon"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("learning_rat", "learning_rate"),
        ("learn", "learning_rate"),
        ("adagrad", "Adagrad"),
        ("epsilom", "epsilon"),
        ("zzz", ""),
        ("", ""),
    ],
)
def test_the_nearest_name(name: str, near: str) -> None:
    assert nearest(name, KNOWN) == near


def test_a_hint_lists_all_where_none_is_near_and_the_caller_wants_that() -> None:
    assert did_you_mean("eps", KNOWN) == "; did you mean 'epsilon'?"
    assert did_you_mean("zzz", KNOWN) == ""
    assert near_or_all("zzz", KNOWN) == "; valid: learning_rate, Adagrad, epsilon"
    assert near_or_all("zzz", []) == ""
