"""A job around a bare model, with example inputs in the place of data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heterps.errors import HeterpsError
from protos.job_pb2 import JobSpec

_ROWS = 8  # batches of example inputs
_SKEW = 1.1  # ids of recommendation data follow a power law near this exponent


@dataclass(frozen=True, slots=True)
class BareModel:
    """`FILE.py:NAME` and the inputs to make up for it.

    Args:
        entry: a callable that returns an nn.Module, such as its class.
        arguments: its keyword arguments.
        batch: samples a step.
        slots, dense: widths of the inputs; None for the model's argument of the same name.
        ids: distinct keys a slot.
    """

    entry: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1024
    slots: int | None = None
    dense: int | None = None
    ids: int = 100_000

    def job(self, folder: Path) -> JobSpec:
        """The job; its example inputs are written to `folder`.

        Raises:
            HeterpsError: the file is missing, or neither width is known.
        """
        file, _, name = self.entry.rpartition(":")
        path = Path(file).expanduser().resolve()
        if not path.is_file():
            raise HeterpsError(f"MODEL: {self.entry}: no such file: {path}; expected FILE.py:NAME")
        slots, dense = self._width("slots", self.slots), self._width("dense", self.dense)
        if not slots and not dense:
            raise HeterpsError(
                f"MODEL: {self.entry}: its inputs are not known; expected --slots N for sparse "
                "keys [B, N], --dense N for numbers [B, N], or both"
            )
        job = JobSpec(name=name.lower().strip("_") or "model", directory=str(path.parent))
        job.model.entry = f"{path.name}:{name}"
        job.model.args.update(dict(self.arguments))
        job.data.path, job.data.train, job.data.label = str(folder), "example.parquet", "label"
        job.data.sparse.extend(f"slot{i}" for i in range(slots))
        job.data.dense.extend(f"number{i}" for i in range(dense))
        job.train.batch_size, job.train.epochs = self.batch, 1
        job.train.loss = "bce_with_logits"
        job.train.optimizer.name, job.train.optimizer.learning_rate = "adam", 1e-3
        self._write(folder / job.data.train, slots, dense)
        return job

    def _width(self, name: str, given: int | None) -> int:
        if given is not None:
            return given
        value = self.arguments.get(name, 0)
        return value if isinstance(value, int) and value > 0 else 0

    def _write(self, path: Path, slots: int, dense: int) -> None:
        import numpy as np
        import pyarrow as pa
        import pyarrow.parquet as pq

        rng = np.random.default_rng(0)
        rows = self.batch * _ROWS
        columns: dict[str, Any] = {"label": rng.integers(0, 2, rows).astype(np.float32)}
        for index in range(slots):
            columns[f"slot{index}"] = rng.zipf(_SKEW, rows) % self.ids
        for index in range(dense):
            columns[f"number{index}"] = rng.standard_normal(rows, dtype=np.float32)
        pq.write_table(pa.table(columns), path)
