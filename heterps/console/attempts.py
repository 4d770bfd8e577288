"""Wrong tokens by the address that they came from: who showed too many has to wait."""

import ipaddress
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

V = TypeVar("V")
FREE = 5  # wrong tokens before the first wait: people mistype
_FIRST_S = 1.0
_LONGEST_S = 300.0
_FORGET_S = 3600.0  # of quiet
MOST = 10_000  # addresses; of more, the quietest are forgotten


class TooManyError(Exception):
    """Too many wrong tokens came from there; nothing was compared.

    Attributes:
        wait_s: whole seconds until the next may be shown.
    """

    def __init__(self, wait_s: int) -> None:
        super().__init__(f"too many wrong tokens from this address; try again in {wait_s} s")
        self.wait_s = wait_s


@dataclass(slots=True)
class _Wrong:
    count: int
    at: float


@dataclass(slots=True)
class Attempts:
    """Counts wrong tokens; after `FREE` of them, each doubles the wait, up to minutes.

    Of IPv6, where one host has as many addresses as it likes, a network of 64 bits counts as one.
    """

    clock: Callable[[], float] = time.monotonic
    _wrong: "OrderedDict[str, _Wrong]" = field(default_factory=OrderedDict)  # the latest last
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        """How many addresses are remembered."""
        return len(self._wrong)

    def check(self, client: str, find: Callable[[], V | None]) -> V | None:
        """Look a token up, unless its sender has to wait; what is found, None for a wrong one.

        It counts as wrong until it is known to be right, so that many at once are no way round.

        Args:
            client: the address that it came from.
            find: looks it up.

        Raises:
            TooManyError: the sender has to wait. Whatever `find` raises; then nothing is counted.
        """
        place, now = _place(client), self.clock()
        with self._lock:
            before = self._wrong.get(place)
            if before is not None and now - before.at > _FORGET_S:
                before = None
            if before is not None and (wait_s := before.at + _pause(before.count) - now) > 0:
                raise TooManyError(math.ceil(wait_s))
            self._put(place, _Wrong(before.count + 1 if before is not None else 1, now))
        try:
            found = find()
        except BaseException:
            self._put_back(place, before)
            raise
        if found:
            self._put_back(place, None)
        return found

    def _put_back(self, place: str, wrong: _Wrong | None) -> None:
        with self._lock:
            self._put(place, wrong)

    def _put(self, place: str, wrong: _Wrong | None) -> None:
        self._wrong.pop(place, None)
        if wrong is not None:
            self._wrong[place] = wrong
        if len(self._wrong) > MOST:
            self._wrong.popitem(last=False)


def _pause(count: int) -> float:
    """Seconds to wait after so many wrong ones."""
    if count < FREE:
        return 0.0
    return float(min(_LONGEST_S, _FIRST_S * 2.0 ** min(count - FREE, 30)))


def _place(client: str) -> str:
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return client
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        if mapped is None:
            return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
        address = mapped
    return str(address)
