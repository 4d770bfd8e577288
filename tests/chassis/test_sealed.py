"""TLS for bulk bytes."""

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from chassis.port import Port, reach
from chassis.sealed import Sealed
from chassis.security import Security
from heterps.home import certs

HERE = "127.0.0.1"


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Security:
    for name, value in certs.make(tmp_path / "certs", [HERE, "::1"]).items():
        monkeypatch.setenv(name, value)
    return Security.from_environment()


@pytest.fixture
def pair(known: Security) -> Iterator[tuple[Sealed, Sealed]]:
    """Both ends of a connection."""
    ends: list[Sealed] = []
    with socket.create_server((HERE, 0)) as listening:

        def accept() -> None:
            context = known.tls_server()
            assert context is not None
            ends.append(Sealed(listening.accept()[0], context))

        thread = threading.Thread(target=accept)
        thread.start()
        context = known.tls_client()
        assert context is not None
        ends.append(Sealed(socket.create_connection(listening.getsockname()), context, HERE))
        thread.join()
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def _all_of(connection: Sealed, size: int) -> bytes:
    room = memoryview(bytearray(size))
    at = 0
    while at < size:
        count = connection.recv_into(room[at:])
        assert count
        at += count
    return bytes(room)


@pytest.mark.parametrize("size", [1, 16_384, 16_385, 1 << 18, (3 << 20) + 7])
def test_bytes_come_as_they_went_both_ways(pair: tuple[Sealed, Sealed], size: int) -> None:
    sent = np.random.default_rng(size).bytes(size)
    for one, other in (pair, pair[::-1]):
        thread = threading.Thread(target=one.sendall, args=(sent,))
        thread.start()
        assert _all_of(other, size) == sent
        thread.join()
    assert pair[0].version() == "TLSv1.3"


def test_an_end_with_and_without_a_word(pair: tuple[Sealed, Sealed]) -> None:
    one, other = pair
    one.sendall(b"last")
    socket.socket.shutdown(one, socket.SHUT_RDWR)
    assert other.recv(10) == b"last"
    assert other.recv(10) == b""
    assert other.recv(10) == b""


def test_bytes_that_were_changed_on_the_way_are_refused(pair: tuple[Sealed, Sealed]) -> None:
    one, other = pair
    socket.socket.sendall(one, b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(ssl.SSLError):
        other.recv(10)


def test_a_timeout_is_one(pair: tuple[Sealed, Sealed]) -> None:
    pair[0].settimeout(0.05)
    with pytest.raises(TimeoutError):
        pair[0].recv(1)
    pair[0].settimeout(0.05)
    with pytest.raises(TimeoutError):
        pair[0].sendall(bytes(64 << 20))


def test_whoever_is_another_is_refused(known: Security, tmp_path: Path) -> None:
    taken: list[socket.socket] = []
    port = Port(HERE, taken.append, known, bulk=True)
    try:
        certs.make(tmp_path / "other", [HERE])
        other = Security(authority=(tmp_path / "other" / certs.CA).read_bytes())
        with pytest.raises(ssl.SSLCertVerificationError):
            reach(HERE, port.number, port.secret, other, bulk=True)
        named = Security(authority=known.authority, name="elsewhere")
        with pytest.raises(ssl.SSLCertVerificationError):
            reach(HERE, port.number, port.secret, named, bulk=True)
        with reach(HERE, port.number, bytes(32), known, bulk=True) as stranger:
            assert stranger.recv(1) == b""
        assert not taken
    finally:
        port.close()


def test_a_port_of_all_addresses_is_one_of_ipv4_too(known: Security) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    taken = threading.Semaphore(0)
    port = Port("[::]", lambda connection: (connection.close(), taken.release()), known, bulk=True)
    try:
        for host in (HERE, "::1"):
            reach(host, port.number, port.secret, known, bulk=True).close()
            assert taken.acquire(timeout=30)
    finally:
        port.close()
