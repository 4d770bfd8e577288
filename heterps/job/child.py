"""A process that works for us and tells how it goes, line by line."""

import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from chassis.process import LIFELINE, inherited

_QUOTED_LINES = 15
_GRACE_S = 3.0


def follow(
    name: str,
    argv: Sequence[str],
    on_line: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> tuple[int, list[str]]:
    """Run a process to its end; its exit code and the last lines that it wrote.

    It ends with this process and, with its own children, when the wait for it is interrupted.

    Args:
        name: of the thread that reads.
        on_line: called with each line that it writes, on that thread.
        environment: variables besides those that processes inherit.
    """
    child = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**inherited(), **(environment or {}), LIFELINE: "1", "PYTHONUNBUFFERED": "1"},
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches us alone, and we end it
    )
    tail: deque[str] = deque(maxlen=_QUOTED_LINES)

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            tail.append(line.rstrip())
            on_line(line.rstrip())

    reader = threading.Thread(target=read, name=name, daemon=True)
    reader.start()
    try:
        code = child.wait()
    except BaseException:
        child.terminate()  # its own children end with it: they hold lifelines
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
        child.kill()
        child.wait()
        raise
    finally:
        if child.stdin is not None:
            child.stdin.close()
    reader.join(2.0)
    return code, list(tail)
