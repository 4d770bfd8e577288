"""Who takes part: HeterPS at some counts and staleness, and its peers."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Ours:
    """HeterPS with so many workers, shards, and updates that a step may lack.

    Attributes:
        threads: on which a worker computes.
    """

    workers: int
    shards: int
    staleness: int
    threads: int = 1

    @property
    def title(self) -> str:
        counts = ((self.workers, "worker"), (self.shards, "shard"))
        workers, shards = (f"{n} {what}{'' if n == 1 else 's'}" for n, what in counts)
        threads = f" of {self.threads} threads" if self.threads > 1 else ""
        return f"HeterPS, {workers}{threads} + {shards}, staleness {self.staleness}"


def unit(threads: int) -> str:
    """The type of resource whose units have so many cores."""
    return f"cpu{threads}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A peer.

    Attributes:
        module: under `bench.ctr.peers`.
        networked: whether rows or gradients cross between processes.
        needs: folders of the peers' directory that it runs from.
        same_process_as: the entry whose process it is, too; empty for one of its own.
        threads: that it computes on; 0: as many as there are.
        checked: whether it is held against the reference.
    """

    name: str
    module: str
    title: str
    networked: bool = False
    needs: tuple[str, ...] = ()
    same_process_as: str = ""
    threads: int = 0
    checked: bool = True


MAIN, AT_ONCE = "1x2+1", "1x2+1 S0"
OURS: Mapping[str, Ours] = {
    "1+1": Ours(1, 1, 1),
    MAIN: Ours(1, 1, 1, threads=2),
    AT_ONCE: Ours(1, 1, 0, threads=2),
    "2+2": Ours(2, 2, 1),
    "2+2 S0": Ours(2, 2, 0),
}
TBE, TBE_ONE, DENSE = "fbgemm", "fbgemm_one", "dense"
ENTRIES: Mapping[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("plain", "plain", "PyTorch, one process, two threads"),
        Entry(TBE, "fbgemm", "FBGEMM TBE, one process, two threads", needs=("fbgemm",)),
        Entry(
            TBE_ONE,
            "fbgemm",
            "FBGEMM TBE, one process, one thread",
            needs=("fbgemm",),
            same_process_as=TBE,
            threads=1,
        ),
        Entry(
            "torchrec",
            "torchrec",
            "TorchRec on gloo, two processes",
            networked=True,
            needs=("torchrec", "fbgemm"),
        ),
        Entry("torch_rpc", "torch_rpc", "PyTorch RPC, worker + server", networked=True),
        Entry(
            "tensorflow",
            "tensorflow_ps",
            "TensorFlow ParameterServerStrategy, worker + server",
            networked=True,
            needs=("tensorflow",),
        ),
        Entry("tfra", "tfra", "TFRA, worker + server", networked=True, needs=("tensorflow",)),
        Entry(DENSE, "dense", "the dense layers alone, as two workers have them", checked=False),
    )
}


def title(name: str) -> str:
    """Of a contestant."""
    return OURS[name].title if name in OURS else ENTRIES[name].title


def launch(entry: Entry, home: Path) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a peer's process.

    Raises:
        FileNotFoundError: what it needs is not installed.
    """
    folders = [home / name for name in entry.needs]
    for folder in folders:
        if not folder.is_dir():
            hint = "python -m bench.ps --install-peers makes it"
            raise FileNotFoundError(f"{folder} is not there: {hint}")
    environment = dict(os.environ)
    interpreters = [folder / "bin" / "python" for folder in folders]
    own = next((str(python) for python in interpreters if python.exists()), "")
    if own:
        environment.pop("PYTHONPATH", None)
    elif folders:
        path = [*map(str, folders), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return [own or sys.executable, "-m", f"bench.ctr.peers.{entry.module}"], environment
