"""A step's gradients, summed over a stage's workers while the backward that completes them runs.

All workers add them in one order, from the last parameter to the first, since that is how backward
comes to them in most models. So which sums there are follows from the parameters alone, whatever is
complete when: a gradient that backward does not come to, or not in this order, and those before it
wait for the end of the backward.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from workers.links.step_sum import StepSum
from workers.model.code.entry import ModelError


class StepGradients:
    """The gradients of one step, on their way to its sums.

    Args:
        sums: of the step.
        parameters: whose gradients are summed.
    """

    def __init__(self, step: int, sums: StepSum, parameters: Sequence[nn.Parameter]) -> None:
        self.step = step
        self.sums = sums
        self.parameters = parameters
        self._made_now = [p.grad is None for p in parameters]
        self._left = len(parameters)  # those that are not added; always the first ones
        self._complete: set[int] = set()

    def complete(self, number: int) -> None:
        """The gradient of a parameter is complete, in a backward that still runs."""
        self._complete.add(number)
        while self._left - 1 in self._complete:
            parameter = self.parameters[self._left - 1]
            assert parameter.grad is not None
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            elif self._made_now[self._left - 1]:  # backward may yet read the memory that it lies in
                parameter.grad = parameter.grad.clone()
            self._add()

    def is_added(self, number: int) -> bool:
        """Whether the gradient of a parameter is being summed."""
        return number >= self._left

    def add_rest(self) -> None:
        """Add what is left once backward is over; zeros for parameters without a gradient."""
        while self._left:
            self._add()

    def _add(self) -> None:
        self._left -= 1
        parameter = self.parameters[self._left]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_conj():  # of complex numbers, whose memory is to be what they are
            parameter.grad = parameter.grad.resolve_conj()
        self.sums.add([parameter.grad])


class Overlap:
    """Sees which gradients are complete, in the last backward of each of a worker's steps.

    Where a backward contains others (activation checkpointing with `use_reentrant=True`), the
    gradient of a parameter that is used several times is accumulated several times. Which these are
    the first backward tells, whose gradients are added after it; they always are.
    """

    def __init__(self) -> None:
        # Of all parameters watched, among those of their step.
        self._numbers: dict[Tensor, int] = {}
        self._hooks: list[RemovableHandle] = []
        self._first = True
        self._repeated: set[int] = set()
        self._seen: set[int] = set()
        self._step: StepGradients | None = None

    def begin(self, step: StepGradients) -> None:
        """Add gradients of a step as the backward that follows completes them."""
        for number, parameter in enumerate(step.parameters):
            if parameter not in self._numbers:  # the weights of each step's version are others
                self._numbers[parameter] = number
                hook = parameter.register_post_accumulate_grad_hook(self._accumulated)
                self._hooks.append(hook)
        self._seen = set()
        self._step = step

    def end(self, step: int) -> StepGradients | None:
        """That of this step, if its gradients were watched: backward is over."""
        begun = self._step
        if begun is None or begun.step != step:
            return None
        self._step, self._first = None, False
        return begun

    def close(self) -> None:
        """Watch nothing any more: parameters and what watches them would keep each other."""
        for hook in self._hooks:
            hook.remove()

    def _accumulated(self, parameter: Tensor) -> None:
        step, number = self._step, self._numbers[parameter]
        if step is None:
            return
        if number in self._seen:
            self._repeated.add(number)
            if step.is_added(number):
                raise ModelError(
                    f"a parameter of shape {list(parameter.shape)}: one backward accumulates its "
                    "gradient several times, which that of the first step did not; expected "
                    "checkpoint(..., use_reentrant=False)"
                )
        self._seen.add(number)
        if not self._first and number not in self._repeated:
            step.complete(number)
