"""Futures that follow one another."""

import threading
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


def test_a_failure_that_is_known_does_not_reach_what_is_started_after_it() -> None:
    """Though the thread it came on is held back just before the failure is forgotten."""
    order, running, go_on = InOrder(), Future[None](), threading.Event()
    lock = order._lock

    class HeldBack:
        def __enter__(self) -> None:
            if threading.current_thread() is late:
                go_on.wait(10)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    failing = order.start("one", lambda: running)
    order._lock = HeldBack()  # type: ignore[assignment]
    late = threading.Thread(target=lambda: running.set_exception(ValueError("no")))
    late.start()
    try:
        assert isinstance(failing.exception(10), ValueError)
        begun: Future[None] = Future()
        after = order.start("one", lambda: begun)
        begun.set_result(None)
        assert after.result(10) is None
    finally:
        go_on.set()
        late.join()
