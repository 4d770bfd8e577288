"""A step's gradient of a stage's dense parameters: summed over workers, then the optimizer's."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from protos.job_pb2 import JobSpec
from workers.learning.optimizers import make_optimizer, make_schedule
from workers.learning.reduction import reduced_over
from workers.links.all_reduce import StageGroup
from workers.links.step_sum import StepSum
from workers.model.statistics import RunningStatistics
from workers.moe.gates import Bias
from workers.stage.overlap import Overlap, StepGradients
from workers.stage.schedule import Schedule
from workers.stage.verdict import Report
from workers.stage.versions import Versions, rekey

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Gradient:
    """A step's gradient, being summed over the stage's workers.

    Args:
        sums: that are under way.
        scalars: float64 [3]: loss, what no row's gradient is beyond, squared norm of the gradients
            that no other worker has.
        used: float32, for each parameter whose gradient is summed how many workers have one.
        loads: of gates that a bias balances.
        statistics: what normalising layers add to their running ones.
    """

    step: int
    sums: StepSum
    scalars: Tensor
    used: Tensor | None
    loads: list[Tensor]
    statistics: list[Tensor]


class Update:
    """What a stage's dense parameters learn by; on all workers of the stage the same.

    Args:
        module: the stage's, on the device.
        statistics: of its normalising layers.
        schedule: of the training.
        versions: of what training changes; the module's are those that all workers begin with.
    """

    def __init__(
        self,
        job: JobSpec,
        module: nn.Module,
        group: StageGroup,
        statistics: RunningStatistics,
        schedule: Schedule,
        versions: Versions,
    ) -> None:
        self._statistics = statistics
        self._schedule = schedule
        self._group = group
        self._clip = job.train.clip > 0
        self._versions = versions
        self._overlap = Overlap()
        parameters = versions.parameters(0)
        self._optimizer = make_optimizer(job.train.optimizer, parameters)
        self._rate = (
            make_schedule(job.train.optimizer, self._optimizer, schedule.steps)
            if self._optimizer is not None
            else None
        )
        self._biased = [m for m in module.modules() if isinstance(m, Bias)]
        for gate in self._biased:  # moves once a step, by what all workers sent
            gate.deferred = True
        group.share_parameters(parameters)
        versions.open()

    def watch(self, step: int) -> None:
        """Begin to sum gradients while the backward that follows, the worker's last, makes them."""
        if self._group.overlaps:
            self._overlap.begin(self._gradients(step))

    def gather(self, step: int, loss: Tensor, largest: Tensor | None) -> Gradient:
        """Begin to sum what this worker's share of a step collected, when all of it is there.

        Args:
            loss: float64 [], this worker's part.
            largest: float64 [], what no gradient of its rows is beyond; None: there are none.
        """
        own: list[nn.Parameter] = []
        parameters: list[nn.Parameter] = []
        for parameter in self._versions.parameters(step):
            (parameters if reduced_over(parameter) == "replica" else own).append(parameter)
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        alone = _squared_norm([p.grad for p in own if p.grad is not None])
        of_rows = torch.zeros_like(loss) if largest is None else largest.to(loss)
        scalars = torch.stack([loss, of_rows, alone.to(loss)])
        loads = [gate.pending.clone() for gate in self._biased]
        for gate in self._biased:
            gate.pending.zero_()
        statistics = self._statistics.take(step, self._schedule.count(step))
        if self._group.size == 1:
            return Gradient(step, self._group.begin_sum(step), scalars, None, loads, statistics)
        used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32)
        used = used.to(loss.device)
        gradients = self._overlap.end(step) or self._gradients(step)
        gradients.add_rest()
        gradients.sums.add([used, scalars, *loads, *statistics])
        return Gradient(step, gradients.sums, scalars, used, loads, statistics)

    def report(self, gradient: Gradient) -> Report:
        """Wait for the sums; what is to be said of them. May be called on any thread."""
        gradient.sums.wait()
        if gradient.used is not None:
            unused = (gradient.used == 0).tolist()
            for parameter, none in zip(self._summed(gradient.step), unused, strict=True):
                if none:  # on no worker, so that optimizers leave it as it is, as they would alone
                    parameter.grad = None
        grads = [p.grad for p in self._summed(gradient.step) if p.grad is not None]
        loss, of_rows, alone = gradient.scalars.tolist()
        if self._clip:
            squared = _squared_norm(grads).item()
            finite = math.isfinite(squared)
        else:
            squared, finite = 0.0, _all_finite(grads)
        return Report(
            squared + alone, finite and of_rows <= _LARGEST and math.isfinite(alone), loss
        )

    def apply(self, gradient: Gradient, scale: float) -> None:
        """Take the step.

        Args:
            scale: by which gradients are multiplied.
        """
        self._advance(gradient)
        if self._optimizer is not None:
            grads = [
                p.grad for p in self._optimizer.param_groups[0]["params"] if p.grad is not None
            ]
            if scale != 1.0 and grads:
                torch._foreach_mul_(grads, scale)
            self._optimizer.step()
            if self._rate is not None:
                self._rate.step()
            self._optimizer.zero_grad(set_to_none=True)
        for gate, load in zip(self._biased, gradient.loads, strict=True):
            gate.pending, kept = load, gate.pending
            gate.step()
            gate.pending = kept

    def skip(self, gradient: Gradient) -> None:
        """Take a step that changes nothing."""
        self._advance(gradient)
        for parameter in self._versions.parameters(gradient.step):
            parameter.grad = None

    def _advance(self, gradient: Gradient) -> None:
        self._versions.advance(gradient.step)
        if self._optimizer is not None:
            rekey(self._optimizer, self._versions.parameters(gradient.step))
        self._statistics.apply(gradient.statistics)

    def _gradients(self, step: int) -> StepGradients:
        return StepGradients(step, self._group.begin_sum(step), self._summed(step))

    def _summed(self, step: int) -> list[nn.Parameter]:
        return [p for p in self._versions.parameters(step) if reduced_over(p) == "replica"]


def _squared_norm(gradients: list[Tensor]) -> Tensor:
    """Squared norm [] of some gradients, float64; infinite or NaN where one of them is."""
    some = [g for g in gradients if g.numel()]
    if not some:
        return torch.zeros((), dtype=torch.float64)
    squared = torch.nn.utils.get_total_norm(some).double().square()
    if not squared.isfinite() and _all_finite(some):  # beyond float32, and no more than that
        squared = torch.nn.utils.get_total_norm([g.double() for g in some]).square()
    return squared


def _all_finite(gradients: list[Tensor]) -> bool:
    some = [g for g in gradients if g.numel()]
    if not some:
        return True
    return bool(torch.nn.utils.get_total_norm(some, norm_type=float("inf")).isfinite())
