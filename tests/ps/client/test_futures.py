"""Futures that follow one another."""

from concurrent.futures import Future

import pytest

from ps.client.futures import InOrder


def test_what_has_one_name_is_begun_in_order_and_not_after_a_failure() -> None:
    order = InOrder()
    running: dict[str, Future[None]] = {}

    def begin(what: str) -> Future[None]:
        return running.setdefault(what, Future())

    first, second, third = (
        order.start("one", lambda what=what: begin(what)) for what in ("first", "second", "third")
    )
    other = order.start("two", lambda: begin("other"))
    assert running.keys() == {"first", "other"}
    running["first"].set_result(None)
    assert first.result(0) is None
    assert running.keys() == {"first", "other", "second"}
    running["second"].set_exception(ValueError("no"))
    for future in (second, third):
        with pytest.raises(ValueError, match="no"):
            future.result(0)
    assert "third" not in running
    assert not other.done()
    order.start("one", lambda: begin("after the failure was known"))
    assert "after the failure was known" in running
