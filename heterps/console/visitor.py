"""Who looks at the console: each sees the scheduler through a token of their own."""

import hashlib
import hmac
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from chassis.roles import Role
from heterps.client.client import Client
from heterps.client.records import Identity
from heterps.console.decisions import DecisionCache
from heterps.errors import HeterpsError, TokenRefusedError
from heterps.home.target import Target

_MOST = 256
Connect = Callable[[], Client]


@dataclass(slots=True)
class Visitor:
    """The holder of a token, and what the scheduler told them: others may not see it.

    Attributes:
        client: with their token: what they may, the scheduler decides.
        connect: makes one more such connection.
    """

    client: Client
    connect: Connect
    identity: Identity | None = None  # once it is known
    decisions: DecisionCache = field(init=False)

    def __post_init__(self) -> None:
        self.decisions = DecisionCache(self.client)

    @property
    def may_cancel(self) -> bool:
        """Whether to offer it; where that cannot be told, the scheduler refuses who may not."""
        if self.identity is None:
            try:
                self.identity = self.client.who()
            except HeterpsError:
                return True
        return Role(self.identity.role).covers(Role.SUBMIT)


class Visitors:
    """Visitors by their tokens; safe for many threads.

    Args:
        target: the scheduler, with the console's own token.
        token: that one; None where nobody is asked.
    """

    def __init__(self, target: Target, token: str | None) -> None:
        self._target = target
        self._token = token
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Visitor] = OrderedDict()
        self.own = self._visitor(None)

    def of(self, shown: str) -> Visitor | None:
        """Who holds this token; None for one that opens nothing.

        Raises:
            HeterpsError: only the scheduler knows, and it does not answer.
        """
        own = (self._token or "").encode()
        if own and hmac.compare_digest(shown.encode(errors="replace"), own):
            return self.own
        key = hashlib.sha256(shown.encode(errors="replace")).digest()
        with self._lock:
            visitor = self._kept.get(key)
        if visitor is None:
            if not self._is_sent() or not _is_plain(shown):
                return None
            visitor = self._visitor(shown)
        try:
            visitor.identity = visitor.client.who()
        except TokenRefusedError:
            return None
        if not visitor.identity.user:  # one who asks nobody knows nobody
            return None
        with self._lock:
            self._kept[key] = visitor
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST:
                self._kept.popitem(last=False)
        return visitor

    def _is_sent(self) -> bool:
        """Whether a token reaches the scheduler: it needs TLS to travel."""
        return self._target.credentials().authority is not None

    def _visitor(self, token: str | None) -> Visitor:
        target = self._target if token is None else replace(self._target, token=token)

        def connect() -> Client:
            return Client.of(target)

        return Visitor(connect(), connect)


def _is_plain(shown: str) -> bool:
    return 16 <= len(shown) <= 512 and shown.isascii() and shown.isprintable()
