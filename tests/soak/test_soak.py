"""The soak itself: a short one holds, and one with a fault planted does not."""

import random
from pathlib import Path

import numpy as np
import pytest

from tests.soak.ledger import KEYS, Account, Ledger, keys_of
from tests.soak.run import soak
from tests.soak.tables import Breach, Tables


def test_a_short_one_holds() -> None:
    figures = soak(5, seed=5, parts=("log",), events=5)
    assert figures["kills_in_all"] >= 2
    assert figures["log"]["acknowledged"] > 0


def _told(path: Path, *pushes: tuple[int, bool]) -> Path:
    ledger = Ledger(path)
    for number, acknowledged in pushes:
        ledger.begin(number)
        if acknowledged:
            ledger.acknowledge(number)
    return path


def test_an_account_tells_lost_twice_and_half(tmp_path: Path) -> None:
    told = _told(tmp_path / "ledger", (0, True), (1, True), (2, False))
    rows = np.zeros((KEYS, 2), np.float32)

    def settle(found: np.ndarray) -> str:
        account = Account()
        account.add(told, seed=9)
        assert (account.acknowledged, account.unknown) == (2, 1)
        return account.settle(found)

    for number in (0, 1):
        rows[keys_of(9, number)] += 1
    assert settle(rows) == ""
    rows[keys_of(9, 2)] += 1
    assert settle(rows) == "", "what nobody heard of may be there"
    twice = rows.copy()
    twice[keys_of(9, 2)] += 1
    assert "twice" in settle(twice)
    lost = rows.copy()
    lost[keys_of(9, 1)[:1]] -= 2
    assert "lack" in settle(lost)
    half = rows.copy()
    half[keys_of(9, 0)[0], 1] -= 1
    assert "half" in settle(half)


def test_a_push_that_was_never_made_is_a_breach(tmp_path: Path) -> None:
    with Tables("log", tmp_path, random.Random(0)) as tables:
        account = tables.accounts["pushed"]
        account.add(_told(tmp_path / "lie", (0, True)), seed=1)
        with pytest.raises(Breach, match="lack"):
            tables.settle()
