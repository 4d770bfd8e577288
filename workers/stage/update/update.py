"""A step's gradient of a stage's dense parameters: summed over workers, then the optimizer's."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from protos.job_pb2 import JobSpec
from workers.learning.averages import AVERAGE, Averages
from workers.learning.norms import squared as squared_by_expert
from workers.learning.optimizers import (
    kept_by,
    make_optimizer,
    make_schedule,
    rate_factor,
    rekey,
)
from workers.learning.reduction import reduced_over
from workers.links.all_reduce import StageGroup
from workers.links.step_sum import StepSum
from workers.model.module.statistics import RunningStatistics
from workers.model.saved.cut import UnfitCutError
from workers.moe.gates import Bias
from workers.moe.layer import MoE
from workers.stage.experts.outside import outside_of
from workers.stage.steps.schedule import Schedule
from workers.stage.steps.verdict import AfterStep, Report
from workers.stage.update.overlap import Overlap, StepGradients
from workers.stage.update.versions import Versions

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Gradient:
    """A step's gradient, being summed over the stage's workers.

    Args:
        sums: that are under way.
        scalars: float64 [losses + 4]: losses, what no row's gradient is beyond, squared norm of the
            gradients that no other worker has, what follows the step, which one worker alone tells,
            and how many would have the training end before it.
        used: float32, for each parameter whose gradient is summed how many workers have one.
        loads: of gates that a bias balances.
        experts: that are out of memory, of each layer which of them have a gradient.
        statistics: what normalising layers add to their running ones.
    """

    step: int
    sums: StepSum
    scalars: Tensor
    used: Tensor | None
    loads: list[Tensor]
    experts: list[Tensor]
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
        self._parameters = parameters = versions.parameters(0)  # the newest
        self._spec = job.train.optimizer
        self.kept = kept_by(self._spec)  # of each parameter
        self._optimizer = make_optimizer(self._spec, parameters, versions.names)
        self._rate = (
            make_schedule(job.train.optimizer, self._optimizer, schedule.steps)
            if self._optimizer is not None
            else None
        )
        self._outside = outside_of(module)
        stacked = {
            f"{name}.{key}" if name else key
            for name, m in module.named_modules()
            if isinstance(m, MoE) and m.experts is None
            for key in ("w1", "w2")
        }
        # Numbers of those that stack experts.
        self._stacks = {
            n for n, names in enumerate(versions.names) if not stacked.isdisjoint(names)
        }
        self._biased = [m for m in module.modules() if isinstance(m, Bias)]
        for gate in self._biased:  # moves once a step, by what all workers sent
            gate.deferred = True
        group.share_parameters(parameters)
        averaged = parameters and job.train.ema
        self.averages = Averages(parameters, job.train.ema) if averaged else None
        versions.open()

    def close(self) -> None:
        """Watch no gradients any more."""
        self._overlap.close()

    def watch(self, step: int) -> None:
        """Begin to sum gradients while the backward that follows, the worker's last, makes them."""
        if self._group.overlaps:
            self._overlap.begin(self._gradients(step))

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """What the optimizer keeps of each parameter of this worker that had a gradient.

        Averages of weights are kept besides, of every parameter.
        """
        if self._optimizer is None:
            return {}
        of, found = self._optimizer.state, dict[str, dict[str, Tensor]]()
        for number, parameter in enumerate(self._parameters):
            own = {key: of[parameter][key] for key in self.kept} if of.get(parameter) else {}
            if self.averages is not None:
                own[AVERAGE] = self.averages.tensors[number]
            if own:
                found[self._versions.names[number][0]] = own
        return found

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Meanwhile the module, of the newest version, has the averages of its weights."""
        if self.averages is None:
            yield
            return
        with self.averages.in_place(self._parameters):
            yield

    def as_of(self, step: int) -> AbstractContextManager[None]:
        """As `RunningStatistics.as_of`."""
        return self._statistics.as_of(step)

    def begin_averages(self) -> None:
        """Have the averages be the weights as they are."""
        if self.averages is not None:
            self.averages.begin(self._parameters)

    def earlier(self, step: int) -> list[dict[str, Tensor]]:
        """As `Versions.earlier`."""
        return self._versions.earlier(step)

    def resume(
        self,
        step: int,
        applied: int,
        optimizer: Mapping[str, Mapping[str, Tensor]],
        earlier: Sequence[Mapping[str, Tensor]],
    ) -> None:
        """Begin at a step; the module has its weights already.

        Args:
            step: how many were taken.
            applied: those that were not skipped.
            optimizer: as of `optimizer_state`, of this worker.
            earlier: as of `earlier`.

        Raises:
            UnfitCutError: it is that of another optimizer.
        """
        self._versions.resume(step, earlier)
        self._parameters = self._versions.newest(step)
        if self._optimizer is None:
            return
        rekey(self._optimizer, self._parameters)
        left = set(optimizer)
        for number, parameter in enumerate(self._parameters):
            names = self._versions.names[number]
            name = next((name for name in names if name in optimizer), None)
            if name is None and self.averages is None:
                continue
            left.discard(name or names[0])
            saved = dict(optimizer[name]) if name is not None else {}
            if self.averages is not None:
                average = saved.pop(AVERAGE, None)
                if average is None or average.shape != parameter.shape:
                    raise UnfitCutError(
                        f"{names[0]!r}: the cut has no average of it, of shape "
                        f"{list(parameter.shape)}; expected one, as train.ema is given"
                    )
                self.averages.resume(number, applied, average)
                if not saved:  # without a gradient so far
                    continue
            fits = all(key == "step" or v.shape == parameter.shape for key, v in saved.items())
            if sorted(saved) != sorted(self.kept) or not fits:
                raise UnfitCutError(
                    f"{name!r}: the optimizer of the cut kept {', '.join(sorted(saved))}; expected "
                    f"{', '.join(self.kept) or 'nothing'}, of shape {list(parameter.shape)}"
                )
            self._optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter.device, copy=True)
                for key, value in saved.items()
            }
        if left:
            raise UnfitCutError(f"{min(left)!r}: the stage trains no such parameter; the cut does")
        if self._rate is not None:
            self._rate.last_epoch = applied
            factor = rate_factor(self._spec, applied, self._schedule.steps)
            for group, base in zip(self._optimizer.param_groups, self._rate.base_lrs, strict=True):
                group["lr"] = base * factor

    def gather(
        self,
        step: int,
        losses: Tensor,
        largest: Tensor | None,
        *,
        after: AfterStep = AfterStep.NOTHING,
        stop: bool = False,
    ) -> Gradient:
        """Begin to sum what this worker's share of a step collected, when all of it is there.

        Args:
            losses: float64 [n], this worker's part, of which the first is the loss.
            largest: float64 [], what no gradient of its rows is beyond; None: there are none.
            after: what this worker would have follow the step.
            stop: whether it would have the training end before it.
        """
        own: list[nn.Parameter] = []
        parameters: list[nn.Parameter] = []
        for parameter in self._versions.parameters(step):
            (parameters if reduced_over(parameter) == "replica" else own).append(parameter)
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            elif parameter.grad is not None and parameter.grad.is_conj():
                parameter.grad = parameter.grad.resolve_conj()  # which optimizers take
        none = torch.zeros_like(losses[0])
        alone = [p.grad for p in own if p.grad is not None]
        of_rows = none if largest is None else largest.to(none)
        of_own = _squared_norm(alone).to(none) if alone else none
        told = [torch.full_like(none, float(flag)) for flag in (after, stop)]
        more = torch.stack([of_rows, of_own, *told])
        scalars = torch.cat([losses, more])
        loads = [gate.pending.clone() for gate in self._biased]
        for gate in self._biased:
            gate.pending.zero_()
        statistics = self._statistics.take(step, self._schedule.count(step))
        experts = self._outside.counts() if self._outside is not None else []
        if self._group.size == 1:
            none_yet = self._group.begin_sum(step)
            return Gradient(step, none_yet, scalars, None, loads, experts, statistics)
        used = torch.tensor(
            [p.grad is not None for p in parameters], dtype=torch.float32, device=losses.device
        )
        gradients = self._overlap.end(step) or self._gradients(step)
        gradients.add_rest()
        gradients.sums.add([used, scalars, *loads, *experts, *statistics])
        return Gradient(step, gradients.sums, scalars, used, loads, experts, statistics)

    def report(self, gradient: Gradient) -> Report:
        """Wait for the sums; what is to be said of them. May be called on any thread."""
        gradient.sums.wait()
        if gradient.used is not None:
            used = gradient.used.tolist()
            for parameter, workers in zip(self._summed(gradient.step), used, strict=True):
                if not workers:  # so that optimizers leave it as it is, as they would alone
                    parameter.grad = None
        of_experts: list[float] = []
        if self._outside is not None:
            add_up = self._group.add_up if self._group.size > 1 else None
            self._outside.gather(gradient.experts, add_up)
            of_experts = self._outside.squared_norms()
        grads, stacks = self._with_gradients(gradient.step)
        *losses, of_rows, alone, after, stop = gradient.scalars.tolist()
        if self._clip:
            of_experts += map(squared_by_expert, stacks)
            squared = _squared_norm(grads).item() + sum(of_experts)
            finite = math.isfinite(squared)
        else:
            squared = 0.0
            finite = _all_finite([*grads, *stacks]) and all(map(math.isfinite, of_experts))
        return Report(
            squared + alone,
            finite and of_rows <= _LARGEST and math.isfinite(alone),
            losses[0],
            AfterStep(int(after)),
            tuple(losses),
            stop > 0,
        )

    def _with_gradients(self, step: int) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients that are summed, and of these the stacks of experts, apart."""
        plain, stacks = list[Tensor](), list[Tensor]()
        for number, parameter in enumerate(self._versions.parameters(step)):
            if parameter.grad is not None and reduced_over(parameter) == "replica":
                (stacks if number in self._stacks else plain).append(parameter.grad)
        return plain, stacks

    def check(self) -> None:
        """Raise at once where another worker of the stage is known to have gone away."""
        self._group.check()

    def apply(self, gradient: Gradient, scale: float) -> None:
        """Take the step.

        Args:
            scale: by which gradients are multiplied.
        """
        self._advance(gradient)
        if self._outside is not None:
            self._outside.apply(scale)
        if self._optimizer is not None:
            grads = [p.grad for p in self._parameters if p.grad is not None]
            if scale != 1.0 and grads:
                torch._foreach_mul_(grads, scale)
            self._optimizer.step()
            if self._rate is not None:
                self._rate.step()
            if self.averages is not None:
                self.averages.add(self._parameters)
            for parameter in self._parameters:
                parameter.grad = None
        for gate, load in zip(self._biased, gradient.loads, strict=True):
            gate.pending, kept = load, gate.pending
            gate.step()
            gate.pending = kept

    def skip(self, gradient: Gradient) -> None:
        """Take a step that changes nothing."""
        self._advance(gradient)
        if self._outside is not None:
            self._outside.skip()
        for parameter in self._versions.parameters(gradient.step):
            parameter.grad = None

    def _advance(self, gradient: Gradient) -> None:
        self._versions.advance(gradient.step)
        self._parameters = self._versions.parameters(gradient.step)
        if self._optimizer is not None:
            rekey(self._optimizer, self._parameters)
        self._statistics.apply(gradient.step, gradient.statistics)

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
    if some[0].device.type == "cpu" and all(math.isfinite(abs(g.sum().item())) for g in some):
        return True  # no sum is where a value is not, and norms take several times as long
    return bool(torch.stack(torch._foreach_norm(some, float("inf"))).isfinite().all())
