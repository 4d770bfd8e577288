"""What a worker keeps of the steps that it has begun."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from workers.learning.objective import EVERY, total
from workers.stage.rows.ahead import PulledRows
from workers.stage.rows.source import StepInput
from workers.stage.steps.schedule import MicroBatchSpec


@dataclass(slots=True)
class OpenStep:
    """A step of this worker under way.

    Attributes:
        own: the micro-batches that it computes.
        given: their inputs in the first stage; elsewhere they arrive.
        rows: whose gradients it collects.
        forward: micro-batches whose forward is done.
        backward: micro-batches whose backward is done.
        loss: of them, float64 [].
        terms: of that those that have a name, float64 [] each.
        awaits_loss: whether its loss, of the whole batch, is still to be computed.
    """

    number: int
    own: tuple[MicroBatchSpec, ...]
    loss: Tensor
    awaits_loss: bool
    given: StepInput | None = None
    rows: list[PulledRows] = field(default_factory=list)
    forward: int = 0
    backward: int = 0
    terms: dict[str, Tensor] = field(default_factory=dict)

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Add a micro-batch's part of the loss, by its terms."""
        if not parts:
            return
        self.loss = self.loss + total(parts).detach().double()
        for name, part in parts.items():
            if name != EVERY:
                own, more = self.terms.get(name), part.detach().double()
                self.terms[name] = more if own is None else own + more

    @property
    def to_forward(self) -> bool:
        """Whether forwards are still to come."""
        return self.forward < len(self.own)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A micro-batch whose backward is still to come."""

    step: OpenStep
    spec: MicroBatchSpec
    inputs: dict[str, Tensor]
    outputs: Mapping[str, Tensor]
    auxiliary: Tensor | None

    def roots(self, gradients: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs that have a gradient, and these."""
        names = [n for n, out in self.outputs.items() if out.requires_grad and n in gradients]
        return [self.outputs[name] for name in names], [gradients[name] for name in names]
