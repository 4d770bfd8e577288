"""The tokens of people and programs: made, found by their secret, revoked.

Of a secret only its SHA-256 is kept. It has 256 random bits, so that nobody finds it by trying,
however fast the digest: salt and slow digests are for what people choose themselves. For the same
reason it is looked up by its digest, of which a stranger cannot come nearer by measuring times.
"""

import hashlib
import re
import secrets
import threading
import time
from collections.abc import Callable

from chassis.roles import GRANTED, ROOT, Caller, Role
from protos.access_pb2 import Token
from scheduler.state.store import Store

PREFIX = "heterps_"  # for people, and for programs that look for secrets
MOST = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_LONGEST_S = 100 * 365 * 86400.0


class TokenError(ValueError):
    """A token that cannot be made."""


class NameTakenError(TokenError):
    """There is a token of that name."""


class Tokens:
    """In memory over `store`, whose one writer a scheduler is while it leads.

    Raises:
        StoreError: from what writes, and at the start; then nothing has changed here.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._by_name = {token.name: token for token in store.tokens()}
        self._by_digest = {token.digest: token for token in self._by_name.values()}

    def create(self, name: str, role: str, expires_s: float, by: str) -> tuple[Token, str]:
        """Make a token; it, and its secret, which nobody is told again.

        Args:
            expires_s: how long it is good for; 0 for ever.
            by: the user who makes it.

        Raises:
            TokenError: a name, role or time that cannot be.
            NameTakenError: there is one of that name, if only an expired one.
        """
        if not _NAME.fullmatch(name) or name == ROOT:
            raise TokenError(
                f"name: {name[:80]!r}: expected 1 to 64 letters, digits and . _ @ -, not {ROOT}"
            )
        if role not in GRANTED:
            raise TokenError(f"role: {role[:80]!r}: expected {', '.join(GRANTED)}")
        if not 0 <= expires_s <= _LONGEST_S:
            raise TokenError(f"expires_s: {expires_s}: expected 0 to {_LONGEST_S:.0f} seconds")
        secret = PREFIX + secrets.token_urlsafe(32)
        now = self._clock()
        token = Token(
            name=name,
            role=role,
            created_at=now,
            created_by=by,
            expires_at=now + expires_s if expires_s else 0.0,
            digest=_digest(secret),
        )
        with self._lock:
            if name in self._by_name:
                raise NameTakenError(f"token {name}: there is one; revoke it first")
            if len(self._by_name) >= MOST:
                raise TokenError(f"{MOST} tokens are there already; revoke some first")
            self._store.put_token(token)
            self._by_name[name] = self._by_digest[token.digest] = token
        return _told(token), secret

    def revoke(self, name: str) -> bool:
        """Make a token open nothing from now on; False when there is none of that name."""
        with self._lock:
            token = self._by_name.get(name)
            if token is None:
                return False
            self._store.drop_token(name)
            del self._by_name[name], self._by_digest[token.digest]
        return True

    def all(self) -> list[Token]:
        """The tokens by name, expired ones among them."""
        with self._lock:
            return [_told(token) for _, token in sorted(self._by_name.items())]

    def find(self, secret: str) -> Caller | None:
        """Who holds the token of that secret; None where it opens nothing."""
        token = self._by_digest.get(_digest(secret))  # no lock: others hold it while Redis hangs
        if token is None or (token.expires_at and self._clock() >= token.expires_at):
            return None
        return Caller(token.name, Role(token.role))


def _told(token: Token) -> Token:
    copy = Token()
    copy.CopyFrom(token)
    copy.ClearField("digest")
    return copy


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()
