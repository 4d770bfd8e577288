"""From a job's `model.entry` to a module, the same on every process of the job."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf.json_format import MessageToDict
from torch import nn

from chassis import entries
from chassis.near import did_you_mean
from protos.job_pb2 import JobSpec, ModelSpec, TableOptions
from ps.errors import TableError
from workers.data.columns.labels import click_label
from workers.data.errors import DataError
from workers.embedding.sparse import SparseEmbedding
from workers.embedding.spec import options_of

_following: ContextVar[bool] = ContextVar("weights follow", default=False)


class ModelError(ValueError):
    """A model that cannot be found, built or traced."""


def load_entry(entry: str, directory: Path, key: str) -> Callable[..., Any]:
    """The callable named by `file.py:name`, `file.py` being relative to `directory`.

    Raises:
        ModelError: names the key, the file or name that is missing.
    """
    try:
        return entries.load_entry(entry, directory, key)
    except entries.EntryError as error:
        raise ModelError(str(error)) from error.__cause__


def build_model(spec: ModelSpec, directory: Path, seed: int) -> nn.Module:
    """Build the job's module with seeded initial parameters, whatever its code draws them from.

    Raises:
        ModelError: the entry is wrong, fails, or returns no module, or one with a layer that
            cannot be reached by its name.
    """
    arguments = {k: integral(v) for k, v in MessageToDict(spec.args).items()}
    with _drawing(seed):  # a module may draw when it is imported
        build = load_entry(spec.entry, directory, "model.entry")
    try:
        with _drawing(seed):
            model = build(**arguments)
    except Exception as error:
        raise ModelError(
            f"model.entry: {spec.entry} with {arguments} failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model.entry: {spec.entry} returned {type(model).__name__}; expected a torch.nn.Module"
        )
    _check_names(spec.entry, model)
    return model


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Have torch, NumPy and Python draw from a seed; the latter two go on as before afterwards."""
    torch.random.manual_seed(seed)  # another of that name imports the compiler
    others = np.random.get_state(), random.getstate()
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(others[0])
        random.setstate(others[1])


def _check_names(entry: str, model: nn.Module) -> None:
    """Refuse what no forward finds: of `self.half = nn.Linear(…)`, `self.half` is the method.

    And modules of TorchScript, whose parameters cannot be put into place for a step.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"model.entry: {entry}: {path or 'the model'!r} is a torch.jit.ScriptModule; "
                "expected the module that was scripted or traced, as it was before: "
                "train.compile compiles layers, and what heterps.load gives can be scripted"
            )
        for name in module._modules:
            if hasattr(nn.Module, name):
                raise ModelError(
                    f"model.entry: {entry}: {type(module).__name__}.{name} is found nowhere, as "
                    f"torch.nn.Module has a method of that name; expected another, such as {name}_"
                )


def weights_follow() -> bool:
    """Whether the model that is being built gets all of its weights afterwards."""
    return _following.get()


def job_model(job: JobSpec, *, weights_follow: bool = False) -> nn.Module:
    """The model of a job, its tables as the job has them.

    Args:
        weights_follow: whether it gets other weights than it begins with, all of them.

    Raises:
        ModelError: the entry is wrong, fails, or returns no module; `tables` does not fit it, or
            the data no table that counts clicks.
    """
    token = _following.set(weights_follow)
    try:
        model = build_model(job.model, Path(job.directory), job.train.seed)
    finally:
        _following.reset(token)
    change_tables(model, job.tables)
    _check_clicks(model, job)
    return model


def change_tables(model: nn.Module, tables: Mapping[str, TableOptions]) -> None:
    """Give the tables of a model the options that a job has for them.

    Raises:
        ModelError: it has no such table, or one that cannot take them.
    """
    layers = [module for module in model.modules() if isinstance(module, SparseEmbedding)]
    there = sorted({layer.spec.table for layer in layers})
    for name, options in sorted(tables.items()):
        if name not in there:
            raise ModelError(
                f"tables.{name}: no table of the model; expected one of "
                f"{', '.join(there) or 'its tables, which are none'}{did_you_mean(name, there)}"
            )
        try:
            for layer in layers:
                if layer.spec.table == name:
                    layer.spec = layer.spec.changed(options_of(options))
        except TableError as error:
            raise ModelError(f"tables.{name}: {error}") from None


def _check_clicks(model: nn.Module, job: JobSpec) -> None:
    for layer in model.modules():
        if isinstance(layer, SparseEmbedding) and layer.spec.score is not None:
            try:
                click_label(job, layer.spec.table, layer.spec.clicks)
            except DataError as error:
                raise ModelError(str(error)) from None


def integral(value: Any) -> Any:
    """Struct numbers are doubles; whole ones were whole in the file."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [integral(v) for v in value]
    if isinstance(value, dict):
        return {k: integral(v) for k, v in value.items()}
    return value
