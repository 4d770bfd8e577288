"""A saved model for those who serve without us: its dense part as one program, its rows as tables.

The program is of `torch.export` or ONNX; beside it lies what it takes, FILE.json, and a folder with
the tables as Parquet.
"""

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from chassis.files import replace_file
from protos.naming import table_prefix
from workers.model.chain.hugging_face import HuggingFace
from workers.model.code.entry import ModelError
from workers.model.module.inputs import ALWAYS, arguments_of
from workers.model.saved.dense_part import DensePart, dense_part
from workers.model.saved.model import Saved, opened
from workers.model.saved.predict import ONLY, predictor_of
from workers.moe.layer import MoE
from workers.ops.plain import decompositions

TORCH, ONNX = "torch", "onnx"
_SAMPLES = (3, 5)  # of the batches that it is traced with, and tried with
_SEED = 0
_TOLERANCE = 1e-4  # of other kernels for the same arithmetic
_OF_TRANSFORMERS = (
    "expected a model that it can follow, or heterps.load(…).model.save_pretrained(folder), which "
    "the exporters for transformers read"
)


class ExportError(ModelError):
    """A model whose dense part cannot be written so."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        program: the file of the dense part.
        inputs: of it, in the order of its arguments: name, table, keys and dim.
        outputs: their names.
        tables: the folder of the tables; empty where the model has none.
    """

    program: str
    inputs: tuple[Mapping[str, Any], ...]
    outputs: tuple[str, ...]
    tables: str


def export(saved: Saved, kind: str, target: Path, sample: str = "") -> Exported:
    """Write a model's dense part, what it takes, and its tables.

    It is held against the model for a batch of another size before it gets its name.

    Args:
        kind: torch or onnx.
        target: of the program. Beside it come TARGET.json and, where the model has tables, the
            folder TARGET.tables, an export as `heterps ps export` makes it.
        sample: a file with rows to trace with, at least five; rows are made up unless given.

    Raises:
        ExportError: it cannot be written there, cannot be traced, gives something else than the
            model, has experts that take what depends on how many samples are in the batch, or
            packs sequences.
        ModelError, CheckpointError, DataError: the model or the sample cannot be read.
    """
    from ps import export_checkpoint

    if kind == ONNX:
        _need_onnx()
    with _beside(target) as folder:
        model = opened(saved)
        _check_experts(model)
        batches = _batches(model, sample)
        _check_packed(model, batches[0])
        part = dense_part(model, [name for name in batches[0] if name not in ALWAYS])
        write: Callable[..., Callable[..., Any]] = _write_onnx if kind == ONNX else _write_torch
        arguments = _arguments(part, model, batches[0])
        try:
            run = write(part, arguments, folder / target.name)
            outputs = _check(model, part, batches[1], run, f"{kind}: {target}")
        except ExportError as error:
            if not isinstance(model, HuggingFace):
                raise
            raise ExportError(f"{error}; {_OF_TRANSFORMERS}") from error
        tables = ""
        target.unlink(missing_ok=True)  # an older one goes with other rows
        if any(one.table for one in part.inputs):
            tables = f"{target}.tables"
            export_checkpoint(saved.tables, tables, replace=True)
        inputs = tuple(_described(one, saved) for one in map(asdict, part.inputs))
        made = Exported(str(target), inputs, outputs, tables)
        told = {"inputs": inputs, "outputs": outputs}
        replace_file(Path(f"{target}.json"), json.dumps(told, indent=2) + "\n")
        # Weights that ONNX has in a file of their own, which the program names, come first.
        for file in sorted(folder.iterdir(), key=lambda file: file.name == target.name):
            os.replace(file, target.with_name(file.name))
    return made


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A folder for files until they are whole, by the names that they will have."""
    try:
        made = TemporaryDirectory(prefix=f".{target.stem}.partial-", dir=target.parent)
    except OSError as error:
        raise ExportError(f"{target}: cannot be written ({error.strerror})") from None
    with made as folder:
        yield Path(folder)


def _check_experts(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, MoE) and (
            layer.capacity_factor is not None or layer.gate.sets_capacity
        ):
            raise ExportError(
                f"{name!r} is a MoE whose experts take no more than a share of the batch's "
                "samples, however many these are, which a program cannot; expected "
                "capacity_factor=None, and another gate than expert_choice, or heterps.load(…) to "
                "predict with it"
            )


@torch.no_grad()
def _check_packed(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    found: list[str] = []

    def look(name: str, _module: nn.Module, *values: Any) -> None:
        if any(map(_is_packed, tree_leaves(values, is_leaf=_is_packed))):
            found.append(name)

    hooks = [
        module.register_forward_hook(partial(look, name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        with suppress(Exception):  # a batch that it does not take is told of when it is traced
            model(**arguments_of(inspect.signature(model.forward).parameters, batch))
    finally:
        for hook in hooks:
            hook.remove()
    if found:
        raise ExportError(
            f"{found[0]!r} has to do with a packed sequence (pack_padded_sequence), whose shape "
            "depends on the lengths of the samples, which no program's may; expected the padded "
            "one, of which forward takes the output at each sample's last place, "
            "out[torch.arange(len(out)), lengths - 1], or heterps.load(…) to predict with it"
        )


def _is_packed(value: object) -> bool:
    return isinstance(value, PackedSequence)


def _described(one: Mapping[str, Any], saved: Saved) -> dict[str, Any]:
    """An input, its table by the file that has it."""
    if not one["table"]:
        return {"name": one["name"]}
    file = f"tables/{table_prefix(saved.job_id)}{one['table']}.parquet"
    return {**one, "table": file}


def _batches(model: nn.Module, sample: str) -> list[dict[str, Tensor]]:
    """Two batches of the model's inputs, of different sizes."""
    predictor = predictor_of(model)
    if sample:
        inputs = predictor.inputs(sample, max(_SAMPLES))
        rows = len(next(iter(inputs.values())))
        if rows < max(_SAMPLES):
            raise ExportError(f"{sample}: {rows} rows; expected at least {max(_SAMPLES)}")
        return [{name: one[:size] for name, one in inputs.items()} for size in _SAMPLES]
    encoder = predictor.encoder()
    if encoder.tokens:
        raise ExportError("how long lists of tokens are is not known; expected --sample FILE")
    random = torch.Generator().manual_seed(_SEED)
    found = []
    for size in _SAMPLES:
        batch = {}
        for name, array in encoder.nothing.arrays.items():
            shape = (size, *array.shape[1:])
            if array.dtype == np.uint8:  # pictures, as models take them
                batch[name] = torch.rand(shape, generator=random)
            elif array.dtype.kind == "f":
                batch[name] = torch.randn(shape, generator=random)
            else:
                batch[name] = torch.randint(0, 2, shape, generator=random)
        found.append(batch)
    return found


def _write_torch(part: DensePart, arguments: tuple[Tensor, ...], path: Path) -> Callable[..., Any]:
    torch.export.save(_program(part, arguments, "torch.export"), path)
    return torch.export.load(path).module()


def _write_onnx(part: DensePart, arguments: tuple[Tensor, ...], path: Path) -> Callable[..., Any]:
    names = [one.name for one in part.inputs]
    own = any(isinstance(module, MoE) for module in part.module.modules())
    model = _program(part, arguments, "ONNX") if own else part.module
    try:
        program = torch.onnx.export(
            model,
            arguments,
            dynamo=True,
            dynamic_shapes=_dynamic(arguments),
            input_names=names,
            verbose=False,
        )
        assert program is not None
        program.save(path)
    except Exception as error:
        raise ExportError(f"ONNX: {type(error).__name__}: {_first(error)}") from error
    return program


def _program(part: DensePart, arguments: tuple[Tensor, ...], where: str) -> ExportedProgram:
    """The dense part in torch's own operators alone."""
    try:
        program = torch.export.export(part.module, arguments, dynamic_shapes=_dynamic(arguments))
        plain: ExportedProgram = program.run_decompositions(decompositions())
    except Exception as error:  # of every kind: it runs the model's own code
        raise ExportError(f"{where}: {type(error).__name__}: {_first(error)}") from error
    return plain


def _dynamic(arguments: Sequence[Tensor]) -> tuple[dict[int, Any], ...]:
    return tuple({0: torch.export.Dim.AUTO} for _ in arguments)


@torch.no_grad()
def _check(
    model: nn.Module,
    part: DensePart,
    batch: Mapping[str, Tensor],
    run: Callable[..., Any],
    where: str,
) -> tuple[str, ...]:
    """Hold what was written against the model; the names of its outputs.

    Raises:
        ExportError: it gives something else, or takes no other batch than it was traced with.
    """
    arguments = _arguments(part, model, batch)
    names = inspect.signature(model.forward).parameters
    expected = _named(model(**arguments_of(names, batch)))
    try:
        given = run(*arguments)
    except Exception as error:
        raise ExportError(
            f"{where}: takes no batch of another size than it was traced with: {_first(error)}"
        ) from error
    found = list(given) if isinstance(given, list | tuple) else list(_named(given).values())
    for (name, one), other in zip(expected.items(), found, strict=True):
        if not torch.allclose(torch.as_tensor(other), one, _TOLERANCE, _TOLERANCE, equal_nan=True):
            raise ExportError(f"{where}: {name!r} is not what the model gives")
    return tuple(expected)


def _arguments(
    part: DensePart, model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    try:
        return part.arguments(model, batch)
    except Exception as error:
        rows = len(next(iter(batch.values())))
        raise ExportError(
            f"{type(model).__name__} takes no batch of {rows} rows: {_first(error)}; expected one "
            "of any size, or --sample with rows that it takes"
        ) from error


def _named(given: Any) -> Mapping[str, Tensor]:
    return given if isinstance(given, Mapping) else {ONLY: given}


def _need_onnx() -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ExportError(
            f"ONNX needs {', '.join(missing)}, which is not installed: `pip install heterps[onnx]`"
        )


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
