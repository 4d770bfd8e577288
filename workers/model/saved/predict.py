"""A saved model predicts rows by the columns that its job names, as training's evaluation did."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from protos.job_pb2 import JobSpec
from workers.data import rows
from workers.data.batches import evaluation_size
from workers.data.columns.arrays import Batch, Encoder, concatenate
from workers.data.columns.labels import labels_of
from workers.data.errors import DataError
from workers.data.rows import Rows
from workers.data.tensors import tensors_of
from workers.learning.losses import predicted
from workers.learning.precision import Precision, wide
from workers.model.code.entry import ModelError
from workers.model.module.inputs import arguments_of

ONLY = "prediction"  # what the output of a model that gives one tensor is called
_PREDICTOR = "_heterps_predictor"  # attribute of a loaded model
_GIVEN = Path("data")  # what is in memory, in errors


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a model gives for some rows.

    Args:
        outputs: by name, `ONLY` where the model gives a tensor without one; of 16 bits as float32.
        rows: that they are of, with what is carried over.
    """

    outputs: dict[str, Tensor]
    rows: Rows


class Predictor:
    """`model.predict` of a loaded model.

    Rows are encoded as in training, and computed in evaluation, in the precision of the job and
    in batches as large as those that training evaluates in. Nothing is changed by it: an unknown
    key reads the first value that its row would have, and gets no row.
    """

    def __init__(self, model: nn.Module, job: JobSpec) -> None:
        self._model = model
        self._job = job
        self._losses = {name: head.loss for name, head in job.train.heads.items()}

    @property
    def batch_rows(self) -> int:
        """Rows of a batch unless told otherwise."""
        return evaluation_size(self._job)

    def __call__(
        self, data: Any, *, logits: bool = False, batch: int = 0
    ) -> Tensor | dict[str, Tensor]:
        """What the model predicts for each row, in their order.

        Args:
            data: the columns that the job reads, labels aside: a pandas or Polars data frame, an
                Arrow table, a dict of equally long columns by name; or a path, folder, glob or URL
                of Parquet, CSV or TSV files.
            logits: leave outputs of `bce_with_logits`, `cross_entropy` and `next_token` as the
                model gives them. Otherwise they are probabilities.
            batch: rows computed at a time; as training's evaluation unless given.

        Returns:
            A tensor [n, …] on the host, or where the model gives several one for each name; those
            without rows, such as a learned scale [], as they are.

        Raises:
            DataError: a column is missing or has another type, a value does not fit.
            ModelError: an output is not of as many rows as there are.
        """
        encoder, parts = self._parts(data, batch)
        found = [one.outputs for one in self.run(parts, logits=logits)] or [
            self.none(encoder, logits=logits)
        ]
        whole = {
            name: torch.cat([one[name] for one in found]) if first.ndim else first
            for name, first in found[0].items()
        }
        return whole[ONLY] if whole.keys() == {ONLY} else whole

    def inputs(self, data: Any, most: int = 0) -> dict[str, Tensor]:
        """What the model's forward takes for some rows, by name: keys among them.

        Args:
            data: as of a call; of files, too, all rows are in memory.
            most: how many rows are read, the first ones; all unless given.

        Raises:
            DataError: as a call.
        """
        parts = self._parts(data, most)[1]
        some = islice(parts, 1) if most else parts
        found = [part.batch for part in some] or [self.encoder().nothing]
        tensors = tensors_of(concatenate(found))
        return {name: tensor for name, tensor in tensors.items() if "." not in name}

    def encoder(self) -> Encoder:
        """From columns to the model's inputs, as in training."""
        return Encoder(self._job.data, labels_of(self._job), inputs_only=True)

    def run(self, parts: Iterable[Rows], *, logits: bool) -> Iterator[Predicted]:
        """Predict batch by batch; arguments and errors are those of a call."""
        for part in parts:
            yield Predicted(self._outputs(part.batch, logits), part)

    def none(self, encoder: Encoder, *, logits: bool = False) -> dict[str, Tensor]:
        """What the model gives for no rows; found out by a row of zeros, which all models take."""
        zeros = {
            name: np.zeros((1, *array.shape[1:]), array.dtype)
            for name, array in encoder.nothing.arrays.items()
        }
        if encoder.tokens and not zeros["tokens"].size:  # how many there are no row says
            zeros["tokens"] = np.zeros((1, 1), np.int32)
        one = self._outputs(Batch(zeros), logits)
        return {name: output[:0] if output.ndim else output for name, output in one.items()}

    def _parts(self, data: Any, batch: int) -> tuple[Encoder, Iterator[Rows]]:
        """Rows as they were given, encoded in batches."""
        encoder = self.encoder()
        if isinstance(data, str | Path):
            paths = rows.find(str(data))
            kept = rows.check(paths, encoder, [])
            blocks = rows.blocks_of_files(paths, encoder.columns, encoder)
        else:
            table = _table(data)
            encoder.check_schema(_GIVEN, table.schema, typed=True)
            kept, blocks = pa.schema([]), rows.blocks_of_table(table, _GIVEN, encoder)
        return encoder, rows.in_batches(blocks, encoder, kept, batch or self.batch_rows)

    @torch.no_grad()
    def _outputs(self, batch: Batch, logits: bool) -> dict[str, Tensor]:
        model, tensors = self._model, tensors_of(batch)
        device = next((one.device for one in model.parameters()), torch.device("cpu"))
        names = inspect.signature(model.forward).parameters
        arguments = arguments_of(names, {name: t.to(device) for name, t in tensors.items()})
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with Precision.of(self._job.train.precision, device).computing():
                given = model(**arguments)
        finally:
            for module, training in modes.items():
                module.training = training
        named = given if isinstance(given, Mapping) else {ONLY: given}
        for name, output in named.items():
            if output.ndim and len(output) != len(batch):
                raise ModelError(
                    f"{type(model).__name__}: output {name!r} is {list(output.shape)} for "
                    f"{len(batch)} rows; expected a value, or several, for each row"
                )
        outputs = {name: output.cpu() for name, output in wide(named).items()}
        if logits:
            return outputs
        return {name: self._meant(name, o, len(outputs)) for name, o in outputs.items()}

    def _meant(self, name: str, output: Tensor, outputs: int) -> Tensor:
        """An output as its loss takes it; as it is where no built-in one reads it."""
        job = self._job
        if job.model.loss or (not self._losses and outputs != 1):
            return output
        if self._losses and name not in self._losses:
            return output
        return predicted(self._losses.get(name, job.train.loss), output)


def add_predictor(model: nn.Module, job: JobSpec) -> nn.Module:
    """The model, with `predict`; one that its class has stays."""
    model.__dict__[_PREDICTOR] = Predictor(model, job)
    if not hasattr(type(model), "predict"):
        model.__dict__["predict"] = model.__dict__[_PREDICTOR]
    return model


def predictor_of(model: nn.Module) -> Predictor:
    """How a loaded model predicts."""
    found = model.__dict__[_PREDICTOR]
    assert isinstance(found, Predictor)
    return found


def _table(data: Any) -> pa.Table:
    """A table of what is in memory.

    Raises:
        DataError: it is nothing with columns, or these are not equally long.
    """
    try:
        if isinstance(data, pa.RecordBatch):
            return pa.Table.from_batches([data])
        if isinstance(data, Mapping):
            return pa.table({name: _column(values) for name, values in data.items()})
        if hasattr(data, "columns") and hasattr(data, "iloc"):  # pandas, whose index is no column
            return pa.Table.from_pandas(data, preserve_index=False)
        return data if isinstance(data, pa.Table) else pa.table(data)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError) as error:
        expected = f"a data frame, or equally long columns by name ({error})"
        raise DataError("data", "predict", type(data).__name__, expected) from None


def _column(values: Any) -> pa.Array:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.ndim > 1:
        values = list(values)
    return values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
