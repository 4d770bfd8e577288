"""A group of shards under the soak: its clients, their accounts, and what may befall them."""

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chassis.closing import Closing
from chassis.process import Child, module_argv, spawn
from ps import (
    CheckpointError,
    Follower,
    LocalShards,
    LocalTable,
    ParameterClient,
    ShardError,
)
from tests.pids import alive
from tests.ps.faults.test_chaos import filled
from tests.soak.clients import DIM, STAMPED, stamp_of
from tests.soak.ledger import KEYS, Account, read
from tests.waiting import wait_until

_LIMIT_S = 120.0
_PAUSE_S = 1.5  # the longest that a process is stopped


class Breach(AssertionError):
    """Something that was promised did not hold."""


@dataclass
class Client:
    """A client's process. Each has a seed of its own: another takes its place when it dies."""

    what: str
    seed: int
    ledger: Path
    process: Child


@dataclass
class Figures:
    """Of one group, for the page."""

    kills: dict[str, int] = field(default_factory=dict)
    pauses: dict[str, int] = field(default_factory=dict)
    recoveries_s: list[float] = field(default_factory=list)
    reshards: int = 0
    saves: int = 0
    loads: int = 0
    refused: int = 0  # saves, loads and re-shards that ended with an error, as they may

    def count(self, of: dict[str, int], what: str) -> None:
        """One more."""
        of[what] = of.get(what, 0) + 1


class Tables(Closing):
    """Shards of one durability, with clients that count, and savers at one place.

    Args:
        durability: `log` or `replica`.
        directory: for all files.
        chance: draws what happens.
        savers: what each of the processes does that save: those of `save` do it at one place.
    """

    def __init__(
        self,
        durability: str,
        directory: Path,
        chance: random.Random,
        savers: Sequence[str] = (),
    ) -> None:
        self.figures = Figures()
        self._chance, self._directory = chance, directory
        self._place = directory / "saved"
        self._replicated = durability == "replica"
        self._shards = LocalShards(
            2,
            data=directory / "data",
            replicas=self._replicated,
            supervised=True,
            options=("--fold", "1"),
        )
        self._all = [*self._shards.addresses]
        if not self._replicated:
            self._all.append(self._shards.add())
        self._client = ParameterClient(self._all[:2], timeout_s=_LIMIT_S)
        self._accounts = {"pushed": Account(), "stepped": Account()}
        for table in self._accounts:
            self._client.create_table(
                table,
                DIM,
                optimizer="sgd",
                learning_rate=1.0,
                initializer="zeros",
                durability=durability,
            )
        for seed in range(len(savers)):
            self._client.create_table(
                stamp_of(seed), DIM, initializer="zeros", durability=durability
            )
        self._seeds = iter(range(1000, 1 << 30))
        self._clients: list[Client] = []
        self._savers: list[Client] = []
        for what in ("push", "push", "steps"):
            self._clients.append(self._start(what, next(self._seeds)))
        for seed, what in enumerate(savers):
            self._savers.append(self._start(what, seed))

    # What may befall it.

    def kill_shard(self) -> None:
        """One of them, or of their replicas; it is back, and answers, when this returns."""
        processes = [*self._shards.processes]
        if self._replicated:
            self._wait_filled()  # one of a pair may die at a time
            processes += self._shards.replicas
        victim = self._chance.choice(processes)
        began = time.monotonic()
        kind = "replica" if victim in self._shards.replicas else "shard"
        with suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
        wait_until(lambda: not alive(victim.pid), "it dies", _LIMIT_S)
        self._wait_running()
        self.figures.count(self.figures.kills, kind)
        self._client.pull("pushed", np.arange(KEYS))
        self.figures.recoveries_s.append(time.monotonic() - began)

    def pause_shard(self) -> None:
        """It answers nobody for a while."""
        victim = self._chance.choice([*self._shards.processes, *self._shards.replicas])
        self._pause(victim.pid)
        self.figures.count(self.figures.pauses, "shard")

    def kill_client(self) -> None:
        """One that pushes or makes steps; another begins."""
        index = self._chance.randrange(len(self._clients))
        client = self._clients[index]
        self._kill(client)
        self._settle_later(client)
        self.figures.count(self.figures.kills, "client")
        self._clients[index] = self._start(client.what, next(self._seeds))

    def kill_saver(self) -> None:
        """In whatever it does; what was saved last must load."""
        index = self._chance.randrange(len(self._savers))
        saver = self._savers[index]
        time.sleep(self._chance.uniform(0, 0.5))
        self._kill(saver)
        self.figures.count(self.figures.kills, "saver")
        self.check_saved()
        self._savers[index] = self._start(saver.what, saver.seed)

    def pause_saver(self) -> None:
        """Another overtakes it."""
        self._pause(self._chance.choice(self._savers).process.pid)
        self.figures.count(self.figures.pauses, "saver")
        self.check_saved()

    def reshard(self) -> None:
        """To two or three shards, perhaps while one dies."""
        where = self._chance.choice([self._all[:2], self._all, self._all[1:]])
        dies = self._chance.random() < 0.4
        if dies:
            with suppress(ProcessLookupError):
                os.kill(self._chance.choice(self._shards.processes).pid, signal.SIGKILL)
            self.figures.count(self.figures.kills, "shard")
        try:
            self._client.reshard(where, timeout_s=20)
            self.figures.reshards += 1
        except ShardError:
            self.figures.refused += 1
        self._wait_running()

    # What must hold.

    def check_saved(self) -> None:
        """Each place has what loads, of one save, no older than was acknowledged."""
        self._check_place([saver for saver in self._savers if saver.what == "save"])
        for saver in self._savers:
            if saver.what == "deltas":
                self._check_deltas(saver)
            elif saver.what == "publish" and (newest := self._newest(saver)) >= 0:
                rows = Follower(self._place / "feed").lookup(stamp_of(saver.seed), STAMPED)
                if not _is_of(rows, newest):
                    raise Breach(f"what is followed is of no one round: {np.unique(rows)}")

    def _check_place(self, savers: Sequence[Client]) -> None:
        told = [self._newest(saver) for saver in savers]
        if max(told, default=-1) < 0:
            return
        try:
            tables = LocalTable.load_checkpoint(self._place / "one")
        except CheckpointError as error:
            raise Breach(f"saves {told} were acknowledged, and none loads: {error}") from None
        self.figures.loads += 1
        pairs = zip(savers, told, strict=True)
        if not any(_is_of(tables[stamp_of(s.seed)].pull(STAMPED), newest) for s, newest in pairs):
            raise Breach(f"what is loaded is of no one save, or older than {told}")

    def _check_deltas(self, saver: Client) -> None:
        """The newest that was acknowledged loads, unless others are made and it goes meanwhile."""
        while (newest := self._newest(saver)) >= 0:
            try:
                tables = LocalTable.load_checkpoint(self._place / "deltas" / str(newest))
            except CheckpointError as error:
                if self._newest(saver) == newest:
                    raise Breach(f"delta {newest} was acknowledged: {error}") from None
                continue
            self.figures.loads += 1
            rows = tables[stamp_of(saver.seed)].pull(STAMPED)
            if not (rows == newest).all():
                raise Breach(f"save {newest} with its deltas has {np.unique(rows)}")
            return

    def settle(self) -> None:
        """With all clients at rest, every account equals its table."""
        for client in self._clients:
            client.process.wait_ready(_LIMIT_S).process.terminate()
        for client in self._clients:
            if code := client.process.process.wait(_LIMIT_S):
                told = _tail(client)
                raise Breach(f"{client.what} {client.seed} ended with {code}: {told}")
            self._settle_later(client)
        self._wait_running()
        for table, account in self._accounts.items():
            if wrong := account.settle(self._client.pull(table, np.arange(KEYS))):
                raise Breach(f"{self._directory.name}: table {table!r}: {wrong}")
        self.figures.saves = sum(self._newest(saver) + 1 for saver in self._savers)
        self._clients = [self._start(c.what, next(self._seeds)) for c in self._clients]

    @property
    def saved(self) -> bool:
        """Whether there are savers."""
        return bool(self._savers)

    @property
    def accounts(self) -> dict[str, Account]:
        """By table."""
        return self._accounts

    def memory(self) -> int:
        """Resident bytes of its shards, that of the largest."""
        pages = [
            int(Path(f"/proc/{child.pid}/statm").read_text().split()[1])
            for child in self._shards.processes
        ]
        return max(pages) * os.sysconf("SC_PAGESIZE")

    def close(self) -> None:
        for client in (*self._clients, *self._savers):
            client.process.stop()
        self._client.close()
        self._shards.close()

    def _start(self, what: str, seed: int) -> Client:
        ledger = self._directory / f"{what}-{seed}.ledger"
        first = 1 + max((number for number, _ in read(ledger)), default=-1)
        argv = module_argv("tests.soak.clients", what, "--seed", str(seed), "--first", str(first))
        argv += ["--ledger", str(ledger), "--addresses", ",".join(self._shards.addresses[:2])]
        argv += ["--place", str(self._place)]
        environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
        child = spawn(
            f"{what}-{seed}", argv, directory=self._directory / "logs", environment=environment
        )
        return Client(what, seed, ledger, child)

    @staticmethod
    def _kill(client: Client) -> None:
        if (code := client.process.poll()) is not None:
            raise Breach(f"{client.what} {client.seed} ended with {code}: {_tail(client)}")
        os.kill(client.process.pid, signal.SIGKILL)
        client.process.process.wait()

    def _settle_later(self, client: Client) -> None:
        account = self._accounts["stepped" if client.what == "steps" else "pushed"]
        account.add(client.ledger, client.seed)
        client.ledger.unlink(missing_ok=True)

    def _pause(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self._chance.uniform(0.1, _PAUSE_S))
            os.kill(pid, signal.SIGCONT)

    def _wait_running(self) -> None:
        wait_until(
            lambda: all(
                c.poll() is None and alive(c.pid)
                for c in (*self._shards.processes, *self._shards.replicas)
            ),
            "all shards run again",
            _LIMIT_S,
        )

    def _wait_filled(self) -> None:
        self._wait_running()
        filled(self._shards)

    @staticmethod
    def _newest(saver: Client) -> int:
        return max((number for number, known in read(saver.ledger) if known), default=-1)


def _is_of(rows: NDArray[np.float32], newest: int) -> bool:
    """Whether all are of one save, that one or a later one."""
    found = np.unique(rows)
    return len(found) == 1 and bool(found[0] >= newest)


def _tail(client: Client) -> str:
    return client.process.log.read_text()[-600:]
