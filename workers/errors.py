"""Errors of more than one room."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class PeerLostError(RuntimeError):
    """A worker that this one exchanges tensors with went away."""


class RowsLostError(PeerLostError):
    """The shards have rows of other steps than workers have weights of."""


class UnfitPlanError(ValueError):
    """A plan of other layers than those of the job's model."""


class RouteError(UnfitPlanError):
    """A plan's way to compute a layer that this machine does not have."""


class DivergedError(ArithmeticError):
    """A loss or gradient of training is not finite."""


class CallbackError(RuntimeError):
    """A callback of the job failed, or did what none may."""


class BestLostError(RuntimeError):
    """The state that became the best could not be kept."""


@contextmanager
def peers_needed() -> Iterator[None]:
    """Where a collective is called; also a decorator of what does.

    Raises:
        PeerLostError: it failed. gloo tells of a lost peer by a bare RuntimeError, torch's store
            and NCCL by an error of torch.distributed's.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            raise PeerLostError(str(error)) from error
        raise
