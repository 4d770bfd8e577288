"""Logs that are read on where an earlier reader stopped."""

from scheduler.runs.logs import LogStream
from scheduler.state.store import Store


def test_a_reader_that_comes_back_gets_the_rest_and_no_broken_character(store: Store) -> None:
    text = "x" + "\u00e9" * 300_000  # a chunk ends within one of them
    store.put_log("job", "stage 0", 0, text.encode())
    got, offsets = "", dict[str, int]()
    while piece := next(LogStream("job", store, offsets).kept(), None):
        got += piece.text
        offsets[piece.process] = piece.next_offset
    assert got == text
    assert offsets == {"stage 0": len(text.encode())}


def test_what_is_not_kept_is_said_once(store: Store) -> None:
    store.put_log("job", "stage 0", 100, b"the end")
    first = next(LogStream("job", store, {}).kept())
    assert (first.text, first.next_offset) == ("[100 bytes were not kept]\n", 100)
    assert [one.text for one in LogStream("job", store, {"stage 0": 100}).kept()] == ["the end"]
    assert [one.text for one in LogStream("job", store, {"stage 0": 104}).kept()] == ["end"]
