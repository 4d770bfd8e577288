"""The end of a step: gradients summed over the stage's workers, then the dense optimizer."""

import logging

from torch import Tensor, nn

from protos.job_pb2 import JobSpec
from workers.learning.optimizers import make_optimizer, make_schedule
from workers.learning.precision import LossScale, Precision
from workers.links.all_reduce import StageGroup
from workers.moe.gates import Bias
from workers.stage.rows import PulledRows

_log = logging.getLogger("heterps.stage")


class Update:
    """What a stage's dense parameters learn by; on all workers of the stage the same.

    Args:
        module: the stage's, on the device.
        steps: of the whole training, for the learning rate.
        precision: of forward passes.

    Attributes:
        loss_scale: by which losses are multiplied before backward; None: not at all.
    """

    def __init__(
        self, job: JobSpec, module: nn.Module, group: StageGroup, steps: int, precision: Precision
    ) -> None:
        self._group = group
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._optimizer = make_optimizer(job.train.optimizer, self._parameters)
        self._rate = (
            make_schedule(job.train.optimizer, self._optimizer, steps)
            if self._optimizer is not None
            else None
        )
        self._biased = [m for m in module.modules() if isinstance(m, Bias)]
        for gate in self._biased:  # moves once a step, by what all workers sent
            gate.deferred = True
        self.loss_scale: LossScale | None = precision.loss_scale()
        group.share_parameters(self._parameters)

    def apply(self, step: int, loss: Tensor, rows: list[PulledRows]) -> tuple[Tensor, bool]:
        """Take the step, unless a worker's gradients are beyond float16.

        Args:
            step: its number.
            loss: scalar, this worker's part.
            rows: whose gradients are divided by the loss scale, too.

        Returns:
            The loss of all workers, and whether the step counts: else nothing must be pushed.
        """
        scalars = [loss]
        if self.loss_scale is not None:
            scalars.append(self._unscale(self.loss_scale, rows))
        sums = self._group.sum_gradients(
            self._parameters, scalars, [gate.pending for gate in self._biased]
        )
        for gate in self._biased:
            gate.step()
        counts = self.loss_scale is None or self._counts(self.loss_scale, step, sums[1])
        if self._optimizer is not None:
            if counts:
                self._optimizer.step()
                if self._rate is not None:
                    self._rate.step()
            self._optimizer.zero_grad(set_to_none=False)
        return sums[0], counts

    def _unscale(self, scale: LossScale, rows: list[PulledRows]) -> Tensor:
        """Divide by the loss scale; above 0 if a gradient of this worker is not finite."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        for block in rows:
            gradients += block.gradients()
        return scale.unscale(gradients)

    @staticmethod
    def _counts(scale: LossScale, step: int, unusable: Tensor) -> bool:
        """Whether all workers' gradients are finite; the scale follows."""
        finite = not unusable.item() > 0
        scale.update(finite)
        if not finite:
            _log.info("step %d skipped: beyond float16; the loss scale is %g", step, scale.value)
        return finite
