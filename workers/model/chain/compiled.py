"""Layers that a job has torch compile, by patterns of their names."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from chassis.near import did_you_mean
from workers.embedding.sparse import SparseEmbedding
from workers.model.chain.trace import TracedModel
from workers.model.code.entry import ModelError


def compile_layers(traced: TracedModel, patterns: Sequence[str]) -> None:
    """Have torch compile these layers for batches of any size; each does so when it first runs.

    Raises:
        ModelError: no layer has such a name, or one looks up rows, which is nothing to compile.
    """
    names = sorted({layer.name.partition("#")[0] for layer in traced.layers})
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            raise ModelError(
                f"train.compile: no layer is named {pattern!r}; there are "
                f"{', '.join(names)}{did_you_mean(pattern, names)}"
            )
        for name in found:
            layer = traced.model.get_submodule(name)
            if any(isinstance(module, SparseEmbedding) for module in layer.modules()):
                raise ModelError(
                    f"train.compile: {name!r}, of {pattern!r}, looks up rows; expected other layers"
                )
            layer.compile(dynamic=True)
