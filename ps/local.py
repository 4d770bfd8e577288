"""Shards on this machine, for tests, benchmarks and notebooks."""

import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from protos.process import Child, module_argv, spawn, stop_all
from ps.checkpoint import is_checkpoint

READY_S = 30.0


class LocalShards:
    """Real server processes on loopback, ended on exit and, however we die, with us.

    Args:
        shards: how many.
        directory: a checkpoint to begin with if one is there, now or at a `restart`; the path
            to give to `ParameterClient.save` when a restart is to bring the rows back.
    """

    def __init__(self, shards: int, directory: str | Path | None = None) -> None:
        if shards < 1:
            raise ValueError(f"LocalShards: shards={shards}; expected at least 1")
        self._directory = Path(directory).absolute() if directory is not None else None
        self._logs = Path(tempfile.mkdtemp(prefix="heterps-ps-"))
        self._children: list[Child] = []
        try:
            for index in range(shards):
                self._children.append(self._spawn(index, shards, "127.0.0.1:0"))
            for child in self._children:
                child.wait_ready(READY_S)
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> list[str]:
        """host:port of every shard, in shard order."""
        return [child.address for child in self._children]

    @property
    def processes(self) -> list[Child]:
        """The processes, in shard order; each has `.pid`."""
        return list(self._children)

    def restart(self, index: int) -> None:
        """Start shard `index` again on the same port, from the checkpoint if one is there."""
        old = self._children[index]
        old.stop()
        self._children[index] = self._spawn(index, len(self._children), old.address)
        self._children[index].wait_ready(READY_S)

    def close(self) -> None:
        """End all processes; safe to repeat."""
        stop_all(self._children)
        shutil.rmtree(self._logs, ignore_errors=True)

    def __enter__(self) -> "LocalShards":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _spawn(self, index: int, shards: int, bind: str) -> Child:
        arguments = ["--bind", bind, "--shard", str(index), "--shards", str(shards)]
        if self._directory is not None and is_checkpoint(self._directory):
            arguments += ["--restore", str(self._directory)]
        argv = module_argv("ps.server", *arguments)
        return spawn(f"ps {index}", argv, directory=self._logs)
