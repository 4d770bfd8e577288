"""Which host each unit of a job comes from: a stage's on as few as possible, neighbours together.

What is least, in this order: the hosts that the groups are spread over, counted for each group;
then the neighbours that have no host in common. Found by trying the hosts of one group after the
other, the widest first; the search is cut off after `_MOST` tries and keeps the best it came to,
so that it is exact for jobs of a few stages and good for any.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from protos.scheduler_pb2 import NodeStatus

_MOST = 3_000

Share = Mapping[str, int]  # host -> units of a group
_Score = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Group:
    """Units of one type that work together, such as a stage's.

    Attributes:
        one_host: they may not be spread over hosts.
        follows: it works with the group before it, and is better off near it.
    """

    type: str
    units: int
    one_host: bool = False
    follows: bool = False


def host_of(node: NodeStatus) -> str:
    """The host part of a node's address."""
    return node.address.rpartition(":")[0]


def pack(
    groups: Sequence[Group], nodes: Sequence[NodeStatus], free: Counter[str]
) -> list[NodeStatus] | None:
    """Take the units of all groups from nodes.

    Args:
        free: units by node id; those that are taken are subtracted.

    Returns:
        The node of each unit, group after group, those of one host next to each other; None when
        there are too few, or no single host has enough for a group of one.
    """
    room: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        room[node.type, host_of(node)] += free[node.node_id]
    search = _Search(groups, room)
    search.run()
    if search.best is None:
        return None
    taken: list[NodeStatus] = []
    for group, share in zip(groups, search.best, strict=True):
        for host, units in share.items():
            having = [n for n in nodes if n.type == group.type and host_of(n) == host]
            taken += _take(having, units, free)
    return taken


def _take(nodes: Sequence[NodeStatus], units: int, free: Counter[str]) -> Iterator[NodeStatus]:
    """Units of one host, from as few of its nodes as can be."""
    while units:
        fitting = [node for node in nodes if free[node.node_id] >= units]
        node = (
            min(fitting, key=lambda n: free[n.node_id])
            if fitting
            else max(nodes, key=lambda n: free[n.node_id])
        )
        count = min(units, free[node.node_id])
        free[node.node_id] -= count
        units -= count
        yield from [node] * count


@dataclass(slots=True)
class _Search:
    """Depth first over the groups; `best` are the shares of the best packing so far."""

    groups: Sequence[Group]
    room: Counter[tuple[str, str]]
    best: list[Share] | None = None
    _score: _Score = (0, 0)
    _tries: int = 0
    _shares: dict[int, Share] = field(default_factory=dict)

    def run(self) -> None:
        """Fill `best`."""
        order = sorted(
            range(len(self.groups)),
            key=lambda n: (not self.groups[n].one_host, -self.groups[n].units),
        )
        self._place(order, 0, (0, 0))

    def _place(self, order: Sequence[int], depth: int, score: _Score) -> None:
        hosts, apart = score
        left = len(order) - depth
        if self.best is not None and (hosts + left, apart) >= self._score:
            return
        if not left:
            self.best = [self._shares[n] for n in range(len(order))]
            self._score = score
            return
        number = order[depth]
        kind = self.groups[number].type
        for share in self._options(number):
            if self._tries >= _MOST:
                return
            self._tries += 1
            self.room.subtract({(kind, host): units for host, units in share.items()})
            self._shares[number] = share
            self._place(order, depth + 1, (hosts + len(share), apart + self._apart(number)))
            del self._shares[number]
            self.room.update({(kind, host): units for host, units in share.items()})

    def _options(self, number: int) -> list[Share]:
        """The hosts that hold the group, best first; the largest ones where none does."""
        group = self.groups[number]
        room = {host: units for (kind, host), units in self.room.items() if kind == group.type}
        near = set().union(*self._neighbours(number))
        fitting = [host for host, units in room.items() if units >= group.units]
        if fitting:
            fitting.sort(key=lambda host: (host not in near, room[host], host))
            return [{host: group.units} for host in fitting]
        if group.one_host:
            return []
        share: dict[str, int] = {}
        left = group.units
        for host in sorted(room, key=lambda host: (-room[host], host not in near, host)):
            share[host] = min(left, room[host])
            left -= share[host]
            if not left:
                return [share]
        return []

    def _neighbours(self, number: int) -> list[set[str]]:
        """The hosts of the groups before and after it that have theirs."""
        pairs = [(number - 1, number), (number, number + 1)]
        return [
            set(self._shares[other])
            for first, second in pairs
            if second < len(self.groups) and self.groups[second].follows
            for other in (first, second)
            if other != number and other in self._shares
        ]

    def _apart(self, number: int) -> int:
        hosts = set(self._shares[number])
        return sum(not hosts & other for other in self._neighbours(number))
