"""A second simulation of rows and shards: a generator for each who acts, all its own."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Act = Iterator["float | Callable[[], bool]"]  # sleeps until a moment, or waits for something


@dataclass
class World:
    """Runs processes until none has anything to do."""

    now: float = 0.0
    _asleep: list[tuple[float, int, Act]] = field(default_factory=list)
    _waiting: list[tuple[Callable[[], bool], int, Act]] = field(default_factory=list)
    _count: int = 0

    def start(self, process: Act) -> None:
        self._count += 1
        self._go_on(self._count, process)

    def run(self) -> None:
        while True:
            while ready := [one for one in self._waiting if one[0]()]:
                first = min(ready, key=lambda one: one[1])
                self._waiting.remove(first)
                self._go_on(*first[1:])
            if not self._asleep:
                return
            self.now = self._asleep[0][0]
            while self._asleep and self._asleep[0][0] <= self.now:
                _, number, process = heapq.heappop(self._asleep)
                self._go_on(number, process)

    def _go_on(self, number: int, process: Act) -> None:
        until = next(process, None)
        if callable(until):
            self._waiting.append((until, number, process))
        elif until is not None:
            heapq.heappush(self._asleep, (until, number, process))


@dataclass
class OneStage:
    """k workers of one stage with rows on shards; seconds as the engine has them."""

    slow: Sequence[float]  # of each worker
    micro_batches: int
    staleness: int
    steps: int
    forward: float
    backward: float
    sync: float
    closing: float
    way: float
    message: float
    pull: float
    push: float
    commit: float
    shards: Sequence[float]  # slowness of each

    def updated(self) -> list[float]:
        """When each update is made."""
        world, width = World(), len(self.slow)
        parts, heard = [0] * self.steps, [0] * self.steps
        pulled, updated, committed = [0] * width, list[float](), list[int]()
        free = [0.0] * len(self.shards)
        total = self.steps * self.micro_batches
        size = self.micro_batches
        shares = [
            [
                sum(m % width == w for m in range(t * size, t * size + size))
                for t in range(self.steps)
            ]
            for w in range(width)
        ]
        least = [sum(shares[w][t] > 0 for w in range(width)) for t in range(self.steps)]

        def ask(at: float, each: float) -> float:
            done = at
            for shard, slowness in enumerate(self.shards):
                free[shard] = max(free[shard], at + self.way) + each * slowness
                done = max(done, free[shard] + self.way)
            return done

        def work(w: int) -> Act:
            for m in range(w, total, width):
                t = m // self.micro_batches
                yield lambda t=t: len(updated) >= t - self.staleness and pulled[w] > t
                yield world.now + self.forward * self.slow[w]
                yield world.now + self.backward * self.slow[w]
                if (m + width) // self.micro_batches > t:
                    yield world.now + self.closing
                    world.start(send(w, t))

        def send(w: int, t: int) -> Act:
            if width > 1:
                yield ask(world.now, self.message + shares[w][t] * self.push)
            parts[t] += 1

        def fetch(w: int) -> Act:
            for t in range(self.steps):
                yield lambda t=t: len(committed) >= t - self.staleness
                if shares[w][t]:
                    yield ask(world.now, self.message + shares[w][t] * self.pull)
                    heard[t] += 1
                pulled[w] = t + 1

        def update() -> Act:
            for t in range(self.steps):
                yield lambda t=t: parts[t] == least[t]
                yield world.now + self.sync
                updated.append(world.now)

        def apply() -> Act:
            for t in range(self.steps):
                last = min(t + self.staleness, self.steps - 1)
                yield (
                    lambda t=t, last=last: (
                        len(updated) > t and all(heard[u] == least[u] for u in range(last + 1))
                    )
                )
                at = world.now
                if width == 1:
                    at = ask(at, self.message + self.micro_batches * self.push)
                yield ask(at, self.message + self.micro_batches * self.commit)
                committed.append(t)

        for w in range(width):
            world.start(fetch(w))
        for w in range(width):
            world.start(work(w))
        world.start(update())
        world.start(apply())
        world.run()
        return updated
