"""The state of a model besides experts of its layers that are out of memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_besides: ContextVar[bool] = ContextVar("besides", default=False)


@contextmanager
def state_besides() -> Iterator[None]:
    """Meanwhile `state_dict` gives what a model has besides experts that are out of memory."""
    token = _besides.set(True)
    try:
        yield
    finally:
        _besides.reset(token)


def is_besides() -> bool:
    """Whether that is what is asked for; else `state_dict` is to refuse."""
    return _besides.get()
