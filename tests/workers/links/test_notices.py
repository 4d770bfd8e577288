"""Notices between workers: over the wire, repeated, forgotten, and to who is gone."""

import socket
import threading

import pytest

from chassis.channels import RpcError
from protos.stage_pb2 import COMMITTED, JUDGED, PULLED, SKIP
from workers.links import line
from workers.links.inbox import Inbox
from workers.links.notices import Notices
from workers.links.service import StageService
from workers.links.session import Session

LIMIT_S = 60.0  # only a hang reaches it


@pytest.fixture
def pair():
    """Two workers of one stage, each served; their services and notices."""
    services = [StageService(Session(Inbox(threading.Event()))) for _ in range(2)]
    for service in services:
        service.serve("127.0.0.1:0")
    addresses = [[service.address for service in services]]
    notices = [
        Notices((0, r), addresses, service.session.board) for r, service in enumerate(services)
    ]
    yield services, notices
    for one in notices:
        one.close()
    for service in services:
        service.stop(0.1)


def test_a_notice_comes_as_it_was_told_once_however_often(pair):
    (_, other), (teller, _) = pair
    woken = threading.Event()
    other.session.board.on_notice = woken.set
    for _ in range(3):
        teller.tell((0, 1), JUDGED, 7, outcome=SKIP, scale=0.25)
    teller.flush()
    assert woken.is_set()
    ((sender, notice),) = other.session.board.of(JUDGED, 7).items()
    assert sender == (0, 0)
    assert (notice.step, notice.outcome, notice.scale) == (7, SKIP, 0.25)
    assert other.session.board.count(JUDGED, 7) == 1
    assert not other.session.board.has(JUDGED, 6)


def test_who_waits_is_woken_by_a_notice_to_itself_as_by_one_of_another(pair):
    services, notices = pair
    for teller in notices:
        ended = threading.Event()
        board, inbox = services[1].session.board, services[1].session.inbox
        step = notices.index(teller)

        def wait(board=board, inbox=inbox, ended=ended, step=step):
            inbox.wait(lambda: board.has(COMMITTED, step))
            ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        teller.tell((0, 1), COMMITTED, step)
        assert ended.wait(LIMIT_S)
        thread.join()


def test_what_is_past_is_forgotten(pair):
    (_, other), (_, own) = pair
    for step in range(4):
        own.tell((0, 1), PULLED, step)
    other.session.board.forget_before(2)
    assert [other.session.board.has(PULLED, step) for step in range(4)] == [
        False,
        False,
        True,
        True,
    ]


def test_a_notice_that_cannot_be_delivered_is_an_error_of_the_next_call(pair):
    services, (teller, _) = pair
    teller.tell((0, 1), PULLED, 0)
    teller.flush()
    services[1].stop(0.1)
    teller.tell((0, 1), PULLED, 1)
    with pytest.raises(RpcError, match="stage 0 worker 1"):
        teller.flush()


def test_who_is_called_away_does_not_wait_for_one_that_is_gone(pair, monkeypatch):
    (service, _), _ = pair
    called_away, ended = threading.Event(), threading.Event()
    own = line.call
    monkeypatch.setattr(line, "call", lambda *told, **how: own(*told, **how | {"retry_s": 600.0}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{probe.getsockname()[1]}"
    notices = Notices(
        (0, 0), [[service.address, dead]], service.session.board, stop=called_away.is_set
    )

    def tell():
        with pytest.raises(RpcError):
            notices.tell((0, 1), COMMITTED, 0)
        ended.set()

    thread = threading.Thread(target=tell)
    thread.start()
    assert not ended.wait(0.5), "it may have been slow to listen"
    called_away.set()
    assert ended.wait(LIMIT_S)
    thread.join()
