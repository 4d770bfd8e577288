"""Rows of several tables: one message to each shard, where they fit one."""

from collections.abc import Sequence
from functools import partial

from ps.client.fetch import Fetched, Wanted, fetch
from ps.client.futures import results_of
from ps.client.pull import MESSAGE_BYTES, Part, Plan, Pull
from ps.client.pull_in_place import PullInPlace
from ps.client.session import Session, Shard
from ps.errors import StaleRouteError
from ps.table.arrays import Floats

Message = list[tuple[int, Wanted]]  # which pull, and what of it


class PullMany:
    """Pulls that travel together, and else each by itself.

    Args:
        session: the connections.
        pulls: of different tables.
    """

    def __init__(self, session: Session, pulls: Sequence[Pull]) -> None:
        self._session = session
        self._pulls = pulls
        self.ready: PullInPlace | None = None

    @property
    def _some(self) -> list[Pull]:
        return [pull for pull in self._pulls if len(pull.wanted.keys)]

    def prepare(self) -> None:
        """Have all be ready to be sent, by `run` or along with a commit; keys must stay."""
        self.ready = self._in_place(self._some)

    def give_up(self) -> None:
        """They will not be run."""
        if self.ready is not None:
            self.ready.give_up()

    def run(self) -> list[Floats]:
        """The rows of each, as of `Pull.run`."""
        several = self._some
        if self.ready is None and len(several) < 2:
            return [pull.run() for pull in self._pulls]
        found = self._together(several)
        if found is None:  # each finds its own way, over routings that change, too
            return results_of([pull.start() for pull in self._pulls])
        rows = iter(found)
        return [next(rows) if len(pull.wanted.keys) else pull.run() for pull in self._pulls]

    def _in_place(self, pulls: Sequence[Pull]) -> PullInPlace | None:
        if any(pull.wanted.wire != "float32" for pull in pulls):
            return None
        return PullInPlace.prepare(self._session, [pull.wanted for pull in pulls])

    def _together(self, pulls: Sequence[Pull]) -> list[Floats] | None:
        """None where they do not fit one message to each shard, or its routing has changed."""
        begun = self.ready or self._in_place(pulls)
        if begun is not None:
            rows = begun.finish()
            if rows is None:
                return None
            return [pull.shaped(own) for pull, own in zip(pulls, rows, strict=True)]
        routes = self._session.routes
        plans = [pull.plan() for pull in pulls]
        split = [
            plan.parts(self._session, pull.wanted.row_bytes)
            for plan, pull in zip(plans, pulls, strict=True)
        ]
        messages = _messages(pulls, split)
        if messages is None or any(plan.routes is not routes for plan in plans):
            return None
        fetched: list[Fetched] = []

        def one(shard: Shard, message: Message) -> Fetched:
            made = fetch(self._session, routes, shard, [some for _, some in message])
            fetched.append(made)
            return made

        try:
            replies = self._session.run([partial(one, *message) for message in messages])
            return _finished(pulls, plans, split, messages, replies)
        except StaleRouteError:
            return None
        finally:
            for each in fetched:
                each.release()


def _messages(
    pulls: Sequence[Pull], split: Sequence[Sequence[Part]]
) -> list[tuple[Shard, Message]] | None:
    """What goes to each shard; None where something does not fit one message."""
    by_shard: dict[str, tuple[Shard, Message]] = {}
    for number, (pull, parts) in enumerate(zip(pulls, split, strict=True)):
        for shard, keys, _ in parts:
            _, message = by_shard.setdefault(shard.address, (shard, []))
            if message and message[-1][0] == number:
                return None
            message.append((number, pull.of(keys)))
    messages = [*by_shard.values()]
    if any(sum(w.rows_bytes for _, w in message) > MESSAGE_BYTES for _, message in messages):
        return None
    return messages


def _finished(
    pulls: Sequence[Pull],
    plans: Sequence[Plan],
    split: Sequence[Sequence[Part]],
    messages: Sequence[tuple[Shard, Message]],
    replies: Sequence[Fetched],
) -> list[Floats]:
    """Each pull's rows, of the replies of all shards."""
    found: dict[tuple[int, str], memoryview] = {}
    for (shard, message), reply in zip(messages, replies, strict=True):
        for (number, _), rows in zip(message, reply.rows, strict=True):
            found[number, shard.address] = rows
    return [
        pull.gathered(plan, parts, [found[number, shard.address] for shard, _, _ in parts])
        for number, (pull, plan, parts) in enumerate(zip(pulls, plans, split, strict=True))
    ]
