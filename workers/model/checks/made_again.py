"""A model is the same whenever and wherever it is built, or it is refused before training.

Each worker builds it, and so does each later attempt, and whoever loads it. What its code draws
from torch, NumPy and Python is seeded; what the system gives, or a clock, is not.
"""

import inspect
import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from chassis.entries import importing_anew
from protos.job_pb2 import JobSpec
from workers.model.checks.trial import first_parts
from workers.model.code.brought import code_root
from workers.model.code.entry import ModelError, job_model
from workers.model.module.inputs import arguments_of
from workers.model.module.tried import tried

_TOLERANCE = 1e-5  # of the sizes: what several threads compute may round otherwise
_SEEDED = (
    "each worker, attempt and job would have its own; expected what follows from train.seed, such "
    "as torch.randn(…), random.random() or np.random.default_rng(0), not np.random.default_rng(), "
    "random.SystemRandom, os.urandom, torch.seed() or a time"
)
_MOST_BYTES = 256 << 20  # of parameters
_Sums = tuple[torch.Size, float, float]
_log = logging.getLogger("heterps.stage")


def check_made_again(model: nn.Module, job: JobSpec) -> None:
    """Refuse a model, just built, that is another one where the same code is run again.

    Its modules are imported anew, as in another process. A model is looked at that gets no other
    weights, and of which there is room for two.

    Raises:
        ModelError: it is, and the remedy.
        DataError: the first samples of the job do not fit it.
    """
    if job.train.warm_start or job.train.offload.memory:
        return
    if sum(one.nbytes for one in model.parameters()) > _MOST_BYTES:
        return
    own = {name: _sums(one) for name, one in model.named_parameters()}
    predicted = _predicted(model, job)
    try:
        with importing_anew(code_root(job)):
            other = job_model(job)
            found = {name: _sums(one) for name, one in other.named_parameters()}
            others = _predicted(other, job)
    except Exception as error:  # of code that can be imported but once
        _log.info("the model could not be built again: %s: %s", type(error).__name__, error)
        return
    entry = f"model.entry: {job.model.entry}"
    for name, sums in own.items():
        if name not in found or not _alike(sums, found[name]):
            raise ModelError(f"{entry}: {name!r} is another one each time it is built: {_SEEDED}")
    if _all_alike(predicted, others) or not _all_alike(predicted, _predicted(model, job)):
        return
    raise ModelError(
        f"{entry}: of the same parameters the model predicts something else each time it is "
        f"built, by a buffer or an attribute: {_SEEDED}"
    )


def _predicted(model: nn.Module, job: JobSpec) -> list[_Sums]:
    """What a model gives for a few samples of the job, in training; nothing if it cannot be tried.

    Raises:
        DataError: they do not fit the job.
    """
    parts = first_parts(job)
    if not parts:
        return []
    given = arguments_of(inspect.signature(model.forward).parameters, parts[0])
    try:
        with tried(model), torch.no_grad():
            return [_sums(one) for one in tree_leaves(model(**given)) if isinstance(one, Tensor)]
    except Exception as error:
        _log.info("the model could not be tried: %s: %s", type(error).__name__, error)
        return []


def _sums(value: Tensor) -> _Sums:
    """Shape, sum, and sum of sizes, of a tensor's values; 0 where these are not plain ones."""
    values = value.detach()
    if values.layout != torch.strided or values.is_nested or values.is_quantized:
        return value.shape, 0.0, 0.0
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    sizes = values.abs().sum(dtype=torch.float64)
    return value.shape, float(values.sum(dtype=torch.float64)), float(sizes)


def _alike(one: _Sums, other: _Sums) -> bool:
    if one[0] != other[0]:
        return False
    some, others = torch.tensor([one[1:], other[1:]], dtype=torch.float64)
    room = _TOLERANCE * max(one[2], other[2])
    return torch.allclose(some, others, rtol=0, atol=room, equal_nan=True)


def _all_alike(some: Sequence[_Sums], others: Sequence[_Sums]) -> bool:
    return len(some) == len(others) and all(map(_alike, some, others))
