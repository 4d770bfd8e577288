"""What every peer of the parameter-server benchmark is measured through.

A peer is one client process with its shard processes. `python -m bench.ps.peers.<name>` reads
commands from its input and answers each with one line of JSON, so that the benchmark can let peers
of different interpreters take turns. Only the standard library and NumPy are needed here.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

LEARNING_RATE = 0.05
INITIAL_ACCUMULATOR = 0.1
EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class Setting:
    """What a client process is started for.

    Attributes:
        batches: file that `bench.ps.batches.write` made.
        dim: floats a row.
        shards: server processes.
        peers_dir: where `--install-peers` put other systems.
    """

    batches: str
    dim: int
    shards: int
    peers_dir: str = ""

    def text(self) -> str:
        """As JSON, for a command line."""
        return json.dumps(asdict(self))


@dataclass(slots=True)
class Batch:
    """Ids of one batch and their gradients.

    Attributes:
        keys: int64 [n], with the slot in the high bits.
        rows: int64 [n]; the same ids as row numbers of a static array, known beforehand.
        grads: float32 [n, dim].
        distinct: whether no key is there twice.
    """

    keys: Ints
    rows: Ints
    grads: Floats
    distinct: bool


@dataclass(slots=True)
class Data:
    """The batches by workload, and all keys that a table holds while they are timed."""

    workloads: dict[str, list[Batch]]
    universe: Ints

    @classmethod
    def read(cls, setting: Setting) -> "Data":
        """Read the file; gradients are drawn here, the same for every peer."""
        with np.load(Path(setting.batches)) as file:
            arrays = {name: file[name] for name in file.files}
        ids = arrays["zipf_keys"].shape[1]
        grads = np.random.default_rng(7).standard_normal((ids, setting.dim), np.float32)
        workloads = {
            name: [
                Batch(keys, rows, grads, name == "distinct")
                for keys, rows in zip(arrays[f"{name}_keys"], arrays[f"{name}_rows"], strict=True)
            ]
            for name in ("zipf", "distinct")
        }
        return cls(workloads, arrays["universe"])


class Peer(ABC):
    """A system that holds rows and updates them.

    Attributes:
        optimizer: adagrad, rowwise_adagrad, or empty where rows are not updated.
        dynamic: whether any 64-bit key may come; else rows have numbers given beforehand.
    """

    optimizer: ClassVar[str] = "adagrad"
    dynamic: ClassVar[bool] = True

    def __init__(self, setting: Setting, data: Data) -> None:
        self.setting = setting
        self.data = data

    @abstractmethod
    def start(self) -> Sequence[int]:
        """Start the shards and make the table; their process ids, none where all is in here."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Versions of what is measured."""

    def fill(self) -> None:
        """Bring every key of the universe into the table: pushes gradients of zero."""
        keys, step = self.data.universe, len(self.data.workloads["zipf"][0].keys)
        zeros = np.zeros((step, self.setting.dim), np.float32)
        for begin in range(0, len(keys), step):
            part = keys[begin : begin + step]
            numbers = np.arange(begin, begin + len(part))
            batch = self.prepare(Batch(part, numbers, zeros[: len(part)], True))
            self.push(batch, self.modes("push", True)[0])

    def modes(self, op: str, distinct: bool) -> tuple[str, ...]:
        """Ways to do `op`; the fastest at the warm-up is the one that is timed."""
        return ("",)

    def prepare(self, batch: Batch) -> Any:
        """The batch as this system takes it; not timed."""
        return batch

    def before(self, op: str, batch: Any, mode: str) -> None:  # noqa: B027 - few need it
        """What `op` needs to have been done; not timed."""

    @abstractmethod
    def pull(self, batch: Any, mode: str) -> Any:
        """The rows of all ids of the batch, in the batch's order, in this process."""

    @abstractmethod
    def push(self, batch: Any, mode: str) -> None:
        """Apply the batch's gradients, those of equal ids summed; until every shard has."""

    def both(self, batch: Any, mode: str) -> None:
        """A pull and then a push."""
        pull, _, push = mode.partition("; ")
        self.pull(batch, pull)
        self.push(batch, push)

    def read(self, batch: Any) -> Floats:
        """The rows of a batch, for checks."""
        return np.asarray(self.pull(batch, self.modes("pull", False)[0]), np.float32)

    def close(self) -> None:  # noqa: B027 - few need it
        """End what was started."""


def shard_positions(keys: Ints, shards: int) -> list[Ints]:
    """Positions of the keys of each shard."""
    if shards == 1:
        return [np.arange(len(keys))]
    return [np.flatnonzero(keys % shards == shard) for shard in range(shards)]


def adagrad(weights: Floats, squares: Floats, grads: Floats) -> None:
    """One step in place, [n, dim] each."""
    squares += grads * grads
    weights -= LEARNING_RATE * grads / (np.sqrt(squares) + EPSILON)
