"""The nodes that are alive, by their leases, and which of their units are taken."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from protos.scheduler_pb2 import NodeStatus
from scheduler.state.packing import Group, pack
from scheduler.state.store import Store

LEASE_S = 5.0
NODE, SHARD = "node", "shard"
_FIND_S = 5.0  # a node that lost its scheduler asks again at least this often
_SLEPT_S = 2.0
FLUSH_S = 0.5
PAGE = 200  # nodes at most
_log = logging.getLogger("heterps.nodes")


@dataclass(slots=True)
class _Lease:
    status: NodeStatus
    expires: float  # time.monotonic()
    presumed: bool = False  # it has not said anything to this scheduler yet


class Nodes:
    """Leases and units in memory, so that a Redis that is away ends no job; Redis has a copy.

    Args:
        store: where leases are copied to, and read from when the scheduler starts.
        lease_s: how long a node lives without a heartbeat.
    """

    def __init__(self, store: Store, lease_s: float = LEASE_S) -> None:
        self._store = store
        self.lease_s = lease_s
        self._leases: dict[str, _Lease] = {}
        self._taken: dict[str, Counter[str]] = {}  # owner -> node id -> units, of the owner's size
        self._sizes: dict[str, Mapping[str, int]] = {}  # owner -> type -> units of nodes in a unit
        self._gone: dict[str, str] = {}  # how nodes ended, by id
        self._drained: set[str] = set()  # ids of nodes that drain, or did until they ended
        self._unwritten: dict[str, NodeStatus | None] = {}  # by node id; None: it has left
        self.changed = threading.Condition()
        self._checked = time.monotonic()  # when leases were checked last, which is often
        self._expected = {status.node_id for status, _ in store.known_nodes()}
        self._expected_until = time.monotonic() + _FIND_S
        for status, left in store.nodes():
            self._leases[status.node_id] = _Lease(status, time.monotonic() + left, presumed=True)

    def renew(self, status: NodeStatus) -> None:
        """Take in a heartbeat; a node that joins is in Redis before anything is placed on it.

        Else a scheduler that takes over before the copy was made would never tell it so.
        """
        with self.changed:
            known = self._leases.get(status.node_id)
        if known is not None and status.draining and not known.status.draining:
            _log.info("%s", _describe(status, f"drains, for {status.ends_in_s:.0f} s at most"))
        if known is None or known.status.address != status.address:
            _log.info("%s", _describe(status, "joins"))
            try:
                self._store.put_node(status, self.lease_s)
            except Exception as error:  # it joins all the same, and `flush` writes it later
                _log.warning("node %s is not in Redis yet: %s", status.node_id, error)
        with self.changed:
            (self._drained.add if status.draining else self._drained.discard)(status.node_id)
            self._leases[status.node_id] = _Lease(status, time.monotonic() + self.lease_s)
            self._unwritten[status.node_id] = status
            self.changed.notify_all()

    def presume(self, status: NodeStatus) -> None:
        """Take a node for alive until it had time to find this scheduler.

        Args:
            status: of a node that a running job was placed on.
        """
        with self.changed:
            if status.node_id in self._leases and not self._leases[status.node_id].presumed:
                return
            expires = time.monotonic() + self.lease_s + _FIND_S
            self._leases[status.node_id] = _Lease(status, expires, presumed=True)

    def has_reported(self, node_id: str) -> bool:
        """Whether a live node has spoken to this scheduler: what its status lists is so."""
        with self.changed:
            lease = self._leases.get(node_id)
            return lease is not None and not lease.presumed

    def rejoined(self) -> bool:
        """Whether the nodes of before have found this scheduler, or had time to."""
        if self._expected and time.monotonic() < self._expected_until:
            with self.changed:
                self._expected = {
                    node_id for node_id in self._expected if not self.has_reported(node_id)
                }
        else:
            self._expected.clear()
        return not self._expected

    def unreachable(self, node_id: str) -> None:
        """A node of before does not answer: it is not waited for."""
        self._expected.discard(node_id)

    def leave(self, status: NodeStatus) -> None:
        """A node says goodbye."""
        with self.changed:
            if self._leases.pop(status.node_id, None) is not None:
                self._gone[status.node_id] = "was drained" if status.draining else "was stopped"
            self._unwritten[status.node_id] = None
            self.changed.notify_all()
        _log.info("%s", _describe(status, "leaves"))

    def flush(self) -> None:
        """Copy to Redis what nodes have said: a heartbeat does not wait for it.

        Raises:
            StoreError: Redis did not take it; it is written later.
        """
        with self.changed:
            unwritten, self._unwritten = self._unwritten, {}
            live = {status.node_id for status in self._live(None)}
        try:
            for node_id, status in list(unwritten.items()):
                if status is None:
                    self._store.drop_node(node_id)
                elif node_id in live:  # an outage may have been longer than its lease
                    self._store.put_node(status, self.lease_s)
                del unwritten[node_id]
        finally:
            with self.changed:
                self._unwritten = unwritten | self._unwritten

    def live(self, kind: str | None = None) -> list[NodeStatus]:
        """Nodes with a valid lease, by id."""
        with self.changed:
            return self._live(kind)

    def placeable(self) -> list[NodeStatus]:
        """Live nodes that take processes: they do not drain."""
        return [status for status in self.live(NODE) if not status.draining]

    def draining(self, node_ids: Collection[str]) -> list[NodeStatus]:
        """Those of some nodes that drain, the one that ends first at the head."""
        found = [s for s in self.live(NODE) if s.draining and s.node_id in node_ids]
        return sorted(found, key=lambda s: s.ends_in_s)

    def is_drained(self, node_id: str) -> bool:
        """Whether a node drains, or did until it ended."""
        with self.changed:
            return node_id in self._drained

    def get(self, node_id: str) -> NodeStatus | None:
        """A live node; None when its lease has expired."""
        with self.changed:
            return next((s for s in self._live(None) if s.node_id == node_id), None)

    def departure(self, node_id: str) -> str:
        """How a node that is not live ended, in words."""
        return self._gone.get(node_id, "is not there any more")

    def listed(self) -> list[NodeStatus]:
        """Live nodes with the units that jobs hold on them."""
        with self.changed:
            nodes = []
            for status in self._live(None):
                copy = NodeStatus()
                copy.CopyFrom(status)
                copy.units_used = self._used(status)
                nodes.append(copy)
            return nodes

    def page(self, limit: int, after: str) -> tuple[list[NodeStatus], str]:
        """A page of `listed`, and the node that the next one comes after; empty: there is none.

        Args:
            limit: how many; `PAGE` at most, and where it is 0.
            after: only those whose ids come after it.
        """
        most = min(limit or PAGE, PAGE)
        left = [status for status in self.listed() if status.node_id > after]
        return left[:most], left[most - 1].node_id if len(left) > most else ""

    def size(self, owner: str, sizes: Mapping[str, int]) -> None:
        """Have a unit of `owner` be several of those that nodes declare.

        All that it reserves, holds and gives back is counted in its own, from then on.

        Args:
            sizes: by type; of others it is one.

        Raises:
            ValueError: it holds units of another size.
        """
        with self.changed:
            if dict(self._sizes.get(owner, {})) == dict(sizes):
                return
            for status in self._live(NODE):
                held = self._taken.get(owner, Counter())[status.node_id]
                if held and self._size(owner, status) != sizes.get(status.type, 1):
                    raise ValueError(f"{owner} holds units of {status.type} of another size")
            self._sizes[owner] = dict(sizes)
            if not sizes:
                del self._sizes[owner]

    def units(self, owner: str = "") -> dict[str, int]:
        """Units of live nodes that take processes, by type; taken or not. In those of `owner`."""
        units: Counter[str] = Counter()
        for status in self.placeable():
            units[status.type] += status.units // self._size(owner, status)
        return dict(units)

    def available(self, owner: str, *, own: bool = True) -> dict[str, int]:
        """Units by type that `owner` could have: those that nobody else holds.

        Args:
            own: or it does itself.
        """
        with self.changed:
            units: Counter[str] = Counter()
            held = self._taken.get(owner, Counter()) if own else Counter()
            for status in self.placeable():
                units[status.type] += max(0, self._free(owner, status, held[status.node_id]))
        return dict(units)

    def reserve(
        self,
        owner: str,
        groups: Sequence[Group],
        singles: Sequence[str] = (),
        *,
        held: Sequence[str] = (),
        avoid: Collection[str] = (),
    ) -> list[NodeStatus] | None:
        """Take free units, all or none.

        Args:
            groups: units that work together, packed onto few hosts.
            singles: a unit of each of these types, spread: each comes from the node of its type
                with the most free units.
            held: node ids, one for each unit of workers of the owner that these replace, and whose
                units they may have; those stay taken.
            avoid: ids of nodes where none is to be.

        Returns:
            The node of each unit, group after group and then of the singles; None when there are
            not enough.
        """
        with self.changed:
            nodes = [
                s
                for s in self.placeable()
                if not self._leases[s.node_id].presumed and s.node_id not in avoid
            ]
            own = Counter(held)
            free = Counter({s.node_id: self._free(owner, s, own[s.node_id]) for s in nodes})
            placed = _placed(groups, singles, nodes, free)
            if placed is not None:
                more = Counter(s.node_id for s in placed) - own
                self._taken.setdefault(owner, Counter()).update(more)
            return placed

    def could_reserve(
        self, groups: Sequence[Group], singles: Sequence[str] = (), owner: str = ""
    ) -> bool:
        """Whether the live nodes would have all these units of `owner` if no job held any."""
        nodes = self.placeable()
        units = Counter({s.node_id: s.units // self._size(owner, s) for s in nodes})
        return _placed(groups, singles, nodes, units) is not None

    def restore(self, owner: str, node_ids: Sequence[str]) -> None:
        """Have these be the units that `owner` holds."""
        with self.changed:
            self._taken[owner] = Counter(node_ids)
            self.changed.notify_all()

    def give_back(self, owner: str, node_ids: Iterable[str]) -> None:
        """Give back some of the units that `owner` holds, one for each time a node is named."""
        with self.changed:
            if owner in self._taken:
                self._taken[owner] -= Counter(node_ids)
                self.changed.notify_all()

    def release(self, owner: str) -> None:
        """Give back all units of `owner`; safe to repeat."""
        with self.changed:
            if self._taken.pop(owner, None):
                self.changed.notify_all()

    def wait_for(
        self, ready: Callable[[], bool], stop: Callable[[], bool], interval_s: float = 0.5
    ) -> bool:
        """Wait until `ready`, asked after each change; False when `stop` came first."""
        while not stop():
            if ready():
                return True
            with self.changed:
                self.changed.wait(interval_s)
        return False

    def _live(self, kind: str | None) -> list[NodeStatus]:
        now = time.monotonic()
        if now - self._checked > _SLEPT_S:  # this process slept, and heard nobody meanwhile
            for lease in self._leases.values():
                lease.expires = max(lease.expires, now + self.lease_s)
        self._checked = now
        for node_id, lease in list(self._leases.items()):
            if lease.expires < now:
                del self._leases[node_id]
                self._gone[node_id] = f"is lost: no heartbeat for {self.lease_s:g} s"
                _log.warning("%s", _describe(lease.status, self._gone[node_id]))
        statuses = [lease.status for lease in self._leases.values()]
        found = [s for s in statuses if kind is None or s.kind == kind]
        return sorted(found, key=lambda s: s.node_id)

    def _size(self, owner: str, status: NodeStatus) -> int:
        """Units of a node in one of `owner`."""
        return self._sizes.get(owner, {}).get(status.type, 1)

    def _used(self, status: NodeStatus) -> int:
        """Units that jobs hold of a node, as it declares them."""
        return sum(
            taken[status.node_id] * self._size(owner, status)
            for owner, taken in self._taken.items()
        )

    def _free(self, owner: str, status: NodeStatus, back: int) -> int:
        """Units that `owner` can take of a node, with so many of its own that it would give."""
        size = self._size(owner, status)
        return (status.units - self._used(status)) // size + back


def _placed(
    groups: Sequence[Group],
    singles: Sequence[str],
    nodes: Sequence[NodeStatus],
    free: Counter[str],
) -> list[NodeStatus] | None:
    """The node of each unit; those taken are subtracted from `free`. None: there are too few."""
    placed = pack(groups, nodes, free)
    if placed is None:
        return None
    for kind in singles:
        fitting = [s for s in nodes if s.type == kind and free[s.node_id] > 0]
        if not fitting:
            return None
        best = max(fitting, key=lambda s: free[s.node_id])
        free[best.node_id] -= 1
        placed.append(best)
    return placed


def _describe(status: NodeStatus, what: str) -> str:
    return (
        f"{status.kind} {status.node_id} ({status.units} {status.type} at {status.address}) {what}"
    )
