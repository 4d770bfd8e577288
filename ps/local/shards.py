"""Shards on this machine, for tests, benchmarks and notebooks."""

import logging
import shutil
import tempfile
import threading
from pathlib import Path

from chassis.closing import Closing
from chassis.exits import DAMAGED
from chassis.process import Child, ChildError, module_argv, spawn, stop_all
from ps.checkpoint.manifest import is_checkpoint
from ps.checkpoint.store import LocalStore
from ps.checkpoint.tables import chain, save_of
from ps.errors import CheckpointError

READY_S = 60.0
_RECOVERED_S = 600.0  # for a shard that repeats its log: one that is ended begins it anew
_LOOK_S = 0.1
_ATTEMPTS = 5
_log = logging.getLogger("heterps.ps")


class LocalShards(Closing):
    """Real server processes on loopback, ended on exit and, however we die, with us.

    Args:
        shards: how many.
        directory: a checkpoint to begin with if one is there, now or at a `restart`; the path
            to give to `ParameterClient.save` when a restart is to bring the rows back.
        data: where each shard keeps what survives it, for tables with a durability, and the rows
            that do not fit memory; a temporary directory unless given.
        replicas: give each shard a second process that is told every change.
        supervised: start a shard that dies again, unless what it kept is damaged.
        options: more arguments of `heterps ps`.
    """

    def __init__(
        self,
        shards: int,
        directory: str | Path | None = None,
        *,
        data: str | Path | None = None,
        replicas: bool = False,
        supervised: bool = False,
        options: tuple[str, ...] = (),
    ) -> None:
        if shards < 1:
            raise ValueError(f"LocalShards: shards={shards}; expected at least 1")
        self._directory = Path(directory).absolute() if directory is not None else None
        self._temporary = Path(tempfile.mkdtemp(prefix="heterps-ps-"))
        self._data = Path(data).absolute() if data is not None else self._temporary / "data"
        self._options = options
        self._children: list[Child] = []
        self._replicas: list[Child] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        try:
            if replicas:
                self._replicas = [self._spawn_replica(i, "127.0.0.1:0") for i in range(shards)]
                for child in self._replicas:
                    child.wait_ready(READY_S)
            self._start(shards)
        except BaseException:
            self.close()
            raise
        if supervised:
            threading.Thread(target=self._supervise, name="supervise", daemon=True).start()

    @property
    def addresses(self) -> list[str]:
        """host:port of every shard, in shard order."""
        return [child.address for child in self._children]

    @property
    def processes(self) -> list[Child]:
        """The processes, in shard order; each has `.pid`."""
        return list(self._children)

    @property
    def replicas(self) -> list[Child]:
        """The replicas' processes, in shard order."""
        return list(self._replicas)

    def add(self) -> str:
        """Start one more, empty shard; its address, to be given to `ParameterClient.reshard`."""
        with self._lock:
            index = len(self._children)
            if self._replicas:
                replica = self._spawn_replica(index, "127.0.0.1:0")
                replica.wait_ready(READY_S)
                self._replicas.append(replica)
            child = self._spawn(index, index + 1, "127.0.0.1:0", fresh=True)
            child.wait_ready(READY_S)
            self._children.append(child)
            return child.address

    def restart(self, index: int) -> None:
        """Start shard `index` again on the same port, with what it, or the checkpoint, kept."""
        with self._lock:
            old = self._children[index]
            old.stop()
            new = self._spawn(index, len(self._children), old.address)
            new.facts = old.facts  # where it will listen, and is to be tried again if it fails
            self._children[index] = new
            new.wait_ready(_RECOVERED_S, self._closing.is_set)

    def restart_replica(self, index: int) -> None:
        """Start the replica of shard `index` again on the same port, empty."""
        with self._lock:
            old = self._replicas[index]
            old.stop()
            new = self._spawn_replica(index, old.address)
            new.facts = old.facts
            self._replicas[index] = new
            new.wait_ready(READY_S)

    def close(self) -> None:
        """End all processes; safe to repeat."""
        self._closing.set()
        with self._lock:
            stop_all(self._children)
            stop_all(self._replicas)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _start(self, shards: int) -> None:
        """Start all shards with one save, though others may be made in its place meanwhile."""
        for attempt in range(_ATTEMPTS):
            save = self._save()
            try:
                for index in range(shards):
                    self._children.append(self._spawn(index, shards, "127.0.0.1:0", save=save))
                for child in self._children:
                    child.wait_ready(READY_S)
                return
            except ChildError:
                if save == self._save() or attempt + 1 == _ATTEMPTS:
                    raise
                stop_all(self._children)
                self._children.clear()

    def _save(self) -> str:
        """The save to begin with; empty where there is none that can be read."""
        if self._directory is None or not is_checkpoint(LocalStore(self._directory)):
            return ""
        try:
            return save_of(chain(LocalStore(self._directory)))
        except CheckpointError:
            return ""  # a shard says what is wrong with it

    def _supervise(self) -> None:
        while not self._closing.wait(_LOOK_S):
            # Replicas first: a shard asks its own for its state before it is ready.
            for children, restart in (
                (self._replicas, self.restart_replica),
                (self._children, self.restart),
            ):
                for index, child in enumerate(list(children)):
                    if child.poll() in (None, DAMAGED) or self._closing.is_set():
                        continue
                    try:
                        restart(index)
                    except ChildError as error:
                        if error.exit_code == DAMAGED:
                            _log.error("%s; it stays down", error)
                        else:
                            _log.warning("%s; it is tried again", error)

    def _spawn(
        self, index: int, shards: int, bind: str, *, fresh: bool = False, save: str = ""
    ) -> Child:
        arguments = ["--bind", bind, "--shard", str(index), "--shards", str(shards)]
        arguments += ["--data", str(self._data / f"shard-{index}")]
        if self._directory is not None and not fresh and is_checkpoint(LocalStore(self._directory)):
            arguments += ["--restore", str(self._directory), *(["--save", save] if save else [])]
        if self._replicas:
            arguments += ["--replica", self._replicas[index].address]
        argv = module_argv("ps.server", *arguments, *self._options)
        return spawn(f"ps {index}", argv, directory=self._temporary)

    def _spawn_replica(self, index: int, bind: str) -> Child:
        disk = str(self._temporary / f"replica-{index}")
        argv = module_argv("ps.server", "--bind", bind, "--disk", disk, *self._options)
        return spawn(f"replica {index}", argv, directory=self._temporary)
