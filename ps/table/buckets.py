"""Which shard holds which keys: 1,024 virtual buckets, dealt out to shards.

Until a routing is installed they are dealt out evenly to the shards that a client names. So each
shard keeps which share of a table it was given, and requests say which they take it to have.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.parameter_server_pb2 import Routing
from ps.engine import _native
from ps.errors import TableError

Route = NDArray[np.uint16]  # bucket -> shard
_SHARE = 1 << 40  # numbers from here on are of shares; versions of routings stay below


def default_route(shards: int) -> Route:
    """Shard i of n has the i-th n-th of the buckets."""
    return (np.arange(_native.BUCKETS, dtype=np.uint32) * shards // _native.BUCKETS).astype(
        np.uint16
    )


def buckets_of(route: Route, shard: int) -> NDArray[np.uint8]:
    """1 for every bucket that the shard has, uint8 [1024]."""
    return np.ascontiguousarray(route == shard, dtype=np.uint8)


def as_flags(buckets: "list[int] | NDArray[np.int64]") -> NDArray[np.uint8]:
    """1 for every bucket named, uint8 [1024].

    Raises:
        TableError: there is no such bucket.
    """
    flags = np.zeros(_native.BUCKETS, np.uint8)
    named = np.asarray(buckets, dtype=np.int64)
    if named.size and not (named.min() >= 0 and named.max() < len(flags)):
        raise TableError(f"buckets {named.min()} to {named.max()}; expected 0 to {len(flags) - 1}")
    flags[named] = 1
    return flags


@dataclass(frozen=True, slots=True)
class Share:
    """The buckets that shard `shard` of `shards` has where no routing was installed."""

    shard: int
    shards: int

    @property
    def number(self) -> int:
        """As messages say it, in the place of a routing's version."""
        return _SHARE | self.shards << 16 | self.shard

    @classmethod
    def of(cls, number: int) -> "Share | None":
        """What a message says; None where it is a version.

        Raises:
            TableError: there is no such share.
        """
        if number < _SHARE:
            return None
        shard, shards = number & 0xFFFF, (number ^ _SHARE) >> 16
        if not shard < shards <= _native.BUCKETS:
            raise TableError(
                f"shard {shard} of {shards}; expected 0 <= shard < shards <= {_native.BUCKETS}"
            )
        return cls(shard, shards)

    def buckets(self) -> NDArray[np.uint8]:
        """1 for each of them, uint8 [1024]."""
        return buckets_of(default_route(self.shards), self.shard)

    def __str__(self) -> str:
        return f"shard {self.shard} of {self.shards}"


def version_of(number: int) -> int:
    """The version of the routing that a message goes by; 0 where it names a share."""
    return 0 if number >= _SHARE else number


def routing_of(addresses: list[str], route: Route, version: int) -> Routing:
    """The message."""
    return Routing(version=version, shards=addresses, bucket=[int(s) for s in route])


def route_of(routing: Routing) -> Route:
    """Bucket -> shard.

    Raises:
        TableError: it is not a routing of all buckets to shards that it names.
    """
    shards = len(routing.shards)
    if routing.version == 0 and not routing.bucket:
        return default_route(max(1, shards))
    route = np.array(routing.bucket, dtype=np.int64)
    if len(route) != _native.BUCKETS or not 1 <= shards <= _native.BUCKETS:
        raise TableError(
            f"routing: {len(route)} buckets over {shards} shards; expected {_native.BUCKETS} "
            f"buckets over 1 to {_native.BUCKETS} shards"
        )
    if routing.version >= _SHARE:
        raise TableError(f"routing: version {routing.version}; expected below 2**40")
    if route.min() < 0 or route.max() >= shards:
        raise TableError(f"routing: a bucket of shard {route.max()}; expected below {shards}")
    return route.astype(np.uint16)


def spread(route: Route, shards: int) -> Route:
    """An even route over so many shards that moves as few buckets as can be.

    Args:
        route: the present one; shards beyond `shards` lose all they have.
        shards: how many from now on.
    """
    out = route.astype(np.int64)
    share = [_native.BUCKETS // shards + (i < _native.BUCKETS % shards) for i in range(shards)]
    out[out >= shards] = -1
    for shard in range(shards):
        out[np.flatnonzero(out == shard)[share[shard] :]] = -1
    for shard in range(shards):
        room = share[shard] - int(np.count_nonzero(out == shard))
        out[np.flatnonzero(out == -1)[:room]] = shard
    return out.astype(np.uint16)
