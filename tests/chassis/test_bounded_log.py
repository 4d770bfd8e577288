"""Logs of a bounded size: long lines are cut, old ones go, and offsets hold."""

import sys
from pathlib import Path

from chassis.bounded_log import BoundedLog
from chassis.process import last_lines, log_path, spawn

_ANNOUNCES = "import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text('{}');"


def test_a_line_of_100_mb_is_cut_with_a_note(tmp_path: Path) -> None:
    log = BoundedLog(log_path(tmp_path, "loud"))
    code = _ANNOUNCES + "print('x' * 100_000_000); print('after')"
    child = spawn("loud", [sys.executable, "-c", code], directory=tmp_path, log=log)
    assert child.process.wait(120) == 0
    assert child.poll() == 0  # its log is whole now
    child.stop()
    first, second = log.path.read_bytes().splitlines()
    assert len(first) < 70_000
    assert first.endswith(b" [99934464 bytes of this line were cut]")
    assert second == b"after"
    assert last_lines(log.path).endswith("after")


def test_the_beginning_goes_and_a_readers_place_holds(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "log", total_bytes=1000)
    read, offset = b"", 0
    for number in range(500):
        log.write(b"line %d\n" % number)
        data, offset, whole = log.read(offset, 1 << 20)
        assert whole
        read += data
    lines = [b"line %d" % number for number in range(500)]
    assert read.splitlines() == lines  # who keeps up misses nothing
    assert log.path.stat().st_size <= 1100
    late, end, whole = log.read(0, 1 << 20)
    assert (end, whole) == (offset, True)
    note, *kept = late.splitlines()
    assert note == b"[%d bytes before this were dropped]" % (offset - len(late) + len(note) + 1)
    assert kept[1:] == lines[-len(kept) + 1 :]
    assert log.read(1 << 40, 10) == (b"", end, True)


def test_lines_that_are_overwritten_count_one_by_one(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "log", line_bytes=10)
    for part in (b"12345\r1234", b"567890123\n", b"x\n"):
        log.write(part)
    assert log.path.read_bytes() == b"12345\r1234567890 [3 bytes of this line were cut]\nx\n"
