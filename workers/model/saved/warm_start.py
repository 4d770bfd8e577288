"""What a training begins with in place of its model's first weights: `train.from`.

A saved model, a cut of a running job, or the file of a plain state_dict.
"""

import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from torch import Tensor, nn

from protos.naming import table_prefix
from ps.checkpoint.manifest import is_checkpoint, read_manifest
from ps.checkpoint.places import open_store
from workers.embedding.sparse import SparseEmbedding, tables_of
from workers.model.code.entry import ModelError
from workers.model.saved.cut import MANIFEST, check_tables, read_cut, split_place, weights_of
from workers.model.saved.facts import DENSE, MODEL, read_dense, read_facts

_KEYS = ("state_dict", "model")  # under which files of training scripts often have it
_SHOWN = 8
_log = logging.getLogger("heterps.stage")


@dataclass(frozen=True, slots=True)
class Weights:
    """What was found.

    Attributes:
        file: that has them, for errors.
        state: by the names of a model's state_dict.
        tables: where a save of its tables lies; empty for none.
        prefix: what their names begin with there.
        dims: of the rows of each, by its name without that.
    """

    file: str
    state: Mapping[str, Tensor]
    tables: str = ""
    prefix: str = ""
    dims: Mapping[str, int] = field(default_factory=dict)


def read_weights(place: str) -> Weights:
    """Read the weights at a folder, file or URL.

    Raises:
        ModelError: there are none.
        CutError: a cut is damaged.
    """
    folder, _, name = place.rstrip("/").rpartition("/")
    try:
        if name.endswith((".safetensors", ".pt", ".pth", ".bin")):
            with open_store(folder or "/").open(name) as stream:
                return Weights(place, _state_dict(place, stream.read()))
        store = open_store(place)
        there = store.entries()
        if MANIFEST in there:
            cut, (cuts, _) = read_cut(place), split_place(place)
            state = weights_of(cuts, cut)
            tables = check_tables(cuts, cut.tables)
            return _with_tables(f"{place}/{MANIFEST}", state, tables, cut.job_id)
        if MODEL not in there:
            raise ModelError(
                f"train.from: {place}: no {MODEL} and no {MANIFEST} there; expected a saved "
                "model, a checkpoint of a job, or a state_dict in a .safetensors or .pt file"
            )
        facts = read_facts(store)
        job_id, dense = str(facts["job_id"]), read_dense(store, facts)
        saved = open_store(f"{store.url}/tables")
        tables = saved.url if is_checkpoint(saved) else ""
        return _with_tables(f"{place}/{DENSE}", dense, tables, job_id)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"train.from: {place}: {error}") from error


def _with_tables(file: str, state: Mapping[str, Tensor], tables: str, job_id: str) -> Weights:
    prefix = table_prefix(job_id)
    specs = read_manifest(open_store(tables)).tables if tables else {}
    dims = {
        name.removeprefix(prefix): int(spec.get("dim", 0))
        for name, spec in specs.items()
        if name.startswith(prefix)
    }
    return Weights(file, state, tables, prefix, dims)


def give_weights(model: nn.Module, weights: Weights, layers: list[str], *, tell: bool) -> None:
    """Give a model what there is of its weights; others stay, and are told.

    Args:
        layers: names of the model's.
        tell: say in the log what has stayed as it was, and what was left over.

    Raises:
        ModelError: one has another shape, as rows of a table may, or there is none of the model's.
    """
    names: dict[int, list[str]] = {}
    own = model.state_dict(keep_vars=True)
    for name, tensor in own.items():
        names.setdefault(id(tensor), []).append(name)
    new: list[str] = []
    with torch.no_grad():
        for shared in names.values():
            tensor = own[shared[0]]
            found = next((name for name in shared if name in weights.state), None)
            if found is None:
                new.append(shared[0])
                continue
            value = weights.state[found]
            if value.shape != tensor.shape or value.is_floating_point() != (
                tensor.is_floating_point()
            ):
                raise ModelError(
                    f"train.from: {weights.file}: {found!r}: {value.dtype} {list(value.shape)}; "
                    f"the model has {tensor.dtype} {list(tensor.shape)}"
                )
            tensor.copy_(value)
    if names and len(new) == len(names):
        raise ModelError(
            f"train.from: {weights.file}: has {_some(sorted(weights.state))}; expected weights of "
            f"the model: {_some(new)}"
        )
    tables = tables_of(m for m in model.modules() if isinstance(m, SparseEmbedding))
    for table, dim in weights.dims.items():
        if table in tables and tables[table].dim != dim:
            raise ModelError(
                f"train.from: {weights.file}: table {table!r} has rows of {dim} values; the "
                f"model's have {tables[table].dim}"
            )
    if not tell:
        return
    if weights.tables and (unknown := sorted(set(tables) - set(weights.dims))):
        _log.warning("new tables, not in %s: %s", weights.file, _some(unknown))
    if gone := sorted(set(weights.dims) - set(tables)):
        _log.warning("tables of %s not in the model: %s", weights.file, _some(gone))
    left = sorted(set(weights.state) - set(own))
    if new:
        with_new = [layer for layer in layers if any(n.startswith(f"{layer}.") for n in new)]
        _log.warning("new layers, not in %s: %s (%s)", weights.file, _some(with_new), _some(new))
    if left:
        _log.warning("of %s not in the model: %s", weights.file, _some(left))


def _state_dict(file: str, data: bytes) -> dict[str, Tensor]:
    if file.endswith(".safetensors"):
        found: dict[str, Tensor] = load_bytes(data)
        return found
    try:
        tree: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file comes to
        first = str(error).partition("\n")[0]
        raise ModelError(f"train.from: {file}: {first}; expected tensors alone") from None
    for key in _KEYS:
        if isinstance(tree, dict) and isinstance(tree.get(key), dict):
            tree = tree[key]
    state = {}
    for name, value in tree.items() if isinstance(tree, dict) else [("it", tree)]:
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ModelError(
                f"train.from: {file}: {str(name)[:80]!r} is a {type(value).__name__}; expected a "
                "state_dict: tensors by name"
            )
        state[name] = value
    return state


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "nothing") + more
