"""Whether a model's code makes of weights in this process what it made of them in training.

What it builds, or does, may follow from the order of a set, or from `hash`: these are alike in all
workers, and others in each further process of Python's. So a few numbers go with a saved model:
what it computes of weights, rows and samples that are made up.
"""

import inspect
import logging
from collections.abc import Mapping
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from protos.job_pb2 import JobSpec
from workers.data.columns.arrays import Encoder
from workers.model.code.entry import ModelError
from workers.model.module.inputs import arguments_of
from workers.model.module.tried import tried

_SAMPLES = 3
_MOST_BYTES = 256 << 20  # of weights: more take too long to make up
_PERIOD = 997  # values, which come again and again
_TOLERANCE = 1e-2  # of the sizes: another processor, or another PyTorch
_log = logging.getLogger("heterps.stage")
Likeness = Mapping[str, list[float]]


def likeness(model: nn.Module, job: JobSpec) -> Likeness:
    """What a model computes of weights that are made up, which it has from then on.

    Returns:
        Of each output by its name: a weighed sum of its values, and one of their sizes. Nothing of
        a model that cannot be tried so, or is another one each time.
    """
    parameters = dict(model.named_parameters())
    if job.data.tokens or sum(one.nbytes for one in parameters.values()) > _MOST_BYTES:
        return {}
    try:
        for name, parameter in parameters.items():
            _make_up(parameter, name)
        inputs = arguments_of(inspect.signature(model.forward).parameters, _samples(job))
        found, again = (_computed(model, inputs) for _ in range(2))
    except Exception as error:
        _log.info("the model could not be tried: %s: %s", type(error).__name__, error)
        return {}
    finite = all(np.isfinite(sums).all() for sums in found.values())
    return found if finite and found == again else {}


def check_likeness(model: nn.Module, job: JobSpec, saved: Likeness, where: str) -> None:
    """Refuse code that makes something else of a model's weights; these are to follow.

    Args:
        saved: as training had it; nothing where it had none.
        where: the model is, for the error.

    Raises:
        ModelError: it does, and the remedy.
    """
    if saved and (found := likeness(model, job)) and not _alike(saved, found):
        raise ModelError(
            f"{where}: in this process the model's code computes something else of the same "
            "weights than in training. It may follow from the order of a set or from hash(…), "
            "which are others in each process, or from a file or library that is another one now; "
            "expected sorted(…) and hashlib in such code. PYTHONHASHSEED=0 has sets and hash(…) "
            "as they were in training"
        )


def _samples(job: JobSpec) -> dict[str, Tensor]:
    """Made up, of the types and widths of the job's."""
    random = torch.Generator().manual_seed(0)
    found = {}
    for name, array in Encoder(job.data, (), inputs_only=True).nothing.arrays.items():
        shape = (_SAMPLES, *array.shape[1:])
        if array.dtype.kind == "f" or array.dtype == np.uint8:  # pictures, as models take them
            found[name] = torch.rand(shape, generator=random)
        else:
            found[name] = torch.randint(0, 2, shape, generator=random)
    return found


@torch.no_grad()
def _make_up(parameter: Tensor, name: str) -> None:
    """Give a parameter values that follow from its name, about as large as layers begin with."""
    if parameter.is_floating_point() and parameter.numel():
        size = 0.5 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
        period = size * torch.sin(0.7 * torch.arange(_PERIOD) + crc32(name.encode()) % _PERIOD)
        values = period.repeat(parameter.numel() // _PERIOD + 1)[: parameter.numel()]
        parameter.copy_(values.view(parameter.shape))


def _computed(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, list[float]]:
    with tried(model), torch.no_grad():
        outputs, _ = tree_flatten_with_path(model.eval()(**inputs))
    found = {}
    for path, output in outputs:
        if isinstance(output, Tensor) and output.is_floating_point():
            values = output.double().reshape(-1)
            weighed = values * torch.linspace(1, 2, len(values), dtype=torch.float64)
            name = "".join(map(str, path))
            found[name] = [float(weighed.sum()), float(weighed.abs().sum())]
    return found


def _alike(one: Likeness, other: Likeness) -> bool:
    return one.keys() == other.keys() and all(
        abs(a - b) <= _TOLERANCE * max(one[name][1], other[name][1])
        for name in one
        for a, b in zip(one[name], other[name], strict=True)
    )
