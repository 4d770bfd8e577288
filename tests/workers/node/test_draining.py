"""A node that is to end waits for its jobs to leave, but not for ever."""

import http.server
import threading
from pathlib import Path

import pytest

from workers.node.draining import Draining, is_given


def test_it_ends_once_nothing_runs_and_has_the_scheduler_told_before() -> None:
    stop, told, over = threading.Event(), threading.Event(), threading.Event()
    draining = Draining(600.0, stop)
    draining.serve(lambda: not over.is_set(), told.set)
    assert draining.ends_in_s is None
    draining.begin()
    assert told.wait(10)
    left = draining.ends_in_s
    assert left is not None
    assert 0 < left <= 600
    assert not stop.is_set()
    over.set()
    assert stop.wait(10)


def test_it_ends_when_its_time_is_over_whatever_runs() -> None:
    stop = threading.Event()
    draining = Draining(0.05, stop)
    draining.serve(lambda: True, lambda: None)
    draining.begin()
    assert stop.wait(10)


def test_the_second_word_ends_it_at_once() -> None:
    stop = threading.Event()
    draining = Draining(600.0, stop)
    draining.serve(lambda: True, lambda: None)
    draining.begin()
    assert not stop.is_set()
    draining.begin()
    assert stop.is_set()


@pytest.mark.parametrize("notice_s", [0.0, 600.0])
def test_where_nothing_runs_or_there_is_no_notice_it_ends_at_once(notice_s: float) -> None:
    stop = threading.Event()
    draining = Draining(notice_s, stop)
    draining.serve(lambda: not notice_s, lambda: None)
    draining.begin()
    assert stop.wait(10)
    assert (draining.ends_in_s is None) == (notice_s == 0), "else jobs are told that they may leave"


def test_a_place_gives_notice_once_it_says_so(tmp_path: Path) -> None:
    place = tmp_path / "notice"
    assert not is_given(str(place))
    place.write_text("FALSE\n")
    assert not is_given(str(place))
    place.write_text("")
    assert is_given(str(place))


def test_a_url_gives_notice_once_it_says_so() -> None:
    said: list[tuple[int, bytes]] = [(404, b"not found")]

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = said[0] if self.headers["Metadata-Flavor"] == "Google" else (403, b"")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/preempted"
        for answer, expected in (
            ((404, b"not found"), False),
            ((200, b"FALSE"), False),
            ((200, b"NONE"), False),
            ((200, b""), False),
            ((200, b"TRUE"), True),
            ((200, b'{"action": "terminate"}'), True),
        ):
            said[0] = answer
            assert is_given(url) is expected
        server.shutdown()
    assert not is_given(url)
