"""Whether a peer trains what the others do: its first steps against NumPy in double precision."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.ctr.shape import (
    ACCUMULATOR,
    BATCH,
    CHECKED,
    DENSE_RATE,
    DIM,
    EACH,
    EPSILON,
    LEARNING_RATE,
    SLOTS,
    Data,
    first_layers,
    first_rows,
)

Doubles = NDArray[np.float64]
# Most rows are as exact as float32. Of popular ones some are not: Adam's first steps are as long
# for the smallest gradients, whose sign may be that of a rounding error, and layers pass it on.
LOSS_TOLERANCE, ROWS_TOLERANCE, SLOT_TOLERANCE = 5e-6, 5e-4, 0.3
_BETAS, _ADAM_EPSILON = (0.9, 0.999), 1e-8


@dataclass(frozen=True, slots=True)
class Expected:
    """What peers should come to.

    Attributes:
        losses: of each step, mean over its samples.
        before, after: the rows that are compared, [n, dim].
        slots: of which each is, [n].
    """

    losses: list[float]
    before: Doubles
    after: Doubles
    slots: NDArray[np.int64]

    def held(self, losses: Sequence[float], rows: NDArray[Any]) -> "Verdict":
        """A peer's losses and rows against these."""
        if len(losses) != len(self.losses) or rows.shape != self.after.shape:
            raise ValueError(
                f"{len(losses)} losses and rows of shape {rows.shape}; expected "
                f"{len(self.losses)} and {self.after.shape}"
            )
        off, moved = np.abs(rows - self.after), np.abs(self.after - self.before)
        of_slots = [
            np.linalg.norm(off[self.slots == slot]) / np.linalg.norm(moved[self.slots == slot])
            for slot in np.unique(self.slots)
        ]
        return Verdict(
            float(np.abs(np.subtract(losses, self.losses)).max()),
            float(np.median(off) / np.median(moved)),
            float(np.max(of_slots)),
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a peer is off.

    Attributes:
        loss: largest difference of a step's loss.
        rows: median difference of rows over the median of what training changes.
        slot: norm of the differences over that of the changes, of the worst slot.
    """

    loss: float
    rows: float
    slot: float

    @property
    def right(self) -> bool:
        """Whether rounding explains it; not a number is never right."""
        return (
            self.loss <= LOSS_TOLERANCE
            and self.rows <= ROWS_TOLERANCE
            and self.slot <= SLOT_TOLERANCE
        )


def expected(data: Data) -> Expected:
    """Train the first steps of the network."""
    numbers, positions = np.unique(data.rows[: CHECKED * BATCH], return_inverse=True)
    positions = positions.reshape(-1, SLOTS)
    rows = np.empty((len(numbers), DIM))
    for slot in range(SLOTS):
        own = numbers // EACH == slot
        rows[own] = first_rows(slot)[numbers[own] % EACH]
    parts = (slice(at, at + BATCH) for at in range(0, CHECKED * BATCH, BATCH))
    steps = ((positions[part], data.dense[part], data.labels[part]) for part in parts)
    losses, after = trained(rows, first_layers(), steps)
    sample = np.searchsorted(numbers, data.checked())
    return Expected(losses, rows[sample], after[sample], data.checked() // EACH)


def trained(
    rows: Doubles,
    layers: Sequence[tuple[NDArray[Any], NDArray[Any]]],
    steps: Iterable[tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]],
) -> tuple[list[float], Doubles]:
    """Loss of each step, and the rows after all.

    Args:
        rows: before, [n, dim].
        layers: weights [outputs, inputs] and biases [outputs].
        steps: of each the rows [B, slots], numbers [B, dense] and labels [B].
    """
    rows, losses = rows.copy(), []
    squares = np.full_like(rows, ACCUMULATOR)
    weights = [array.astype(np.float64) for layer in layers for array in layer]
    moments = [(np.zeros_like(array), np.zeros_like(array)) for array in weights]
    for number, (positions, dense, labels) in enumerate(steps, 1):
        vectors = rows[positions].reshape(len(positions), -1)
        loss, of_vectors, of_weights = _backward(np.hstack([vectors, dense]), labels, weights)
        losses.append(loss)
        touched, inverse = np.unique(positions, return_inverse=True)
        sums = np.zeros((len(touched), rows.shape[1]))
        own = of_vectors[:, : vectors.shape[1]].reshape(-1, rows.shape[1])
        np.add.at(sums, inverse.reshape(-1), own)
        squares[touched] += sums**2
        rows[touched] -= LEARNING_RATE * sums / (np.sqrt(squares[touched]) + EPSILON)
        for array, grad, (first, second) in zip(weights, of_weights, moments, strict=True):
            _adam(array, grad, first, second, number)
    return losses, rows


def _backward(
    given: Doubles, labels: NDArray[Any], weights: Sequence[Doubles]
) -> tuple[float, Doubles, list[Doubles]]:
    """Loss, and gradients of what the layers are given and of their weights."""
    pairs = list(zip(weights[::2], weights[1::2], strict=True))
    inputs = [given]
    for weight, bias in pairs[:-1]:
        inputs.append(np.maximum(inputs[-1] @ weight.T + bias, 0.0))
    weight, bias = pairs[-1]
    logits = (inputs[-1] @ weight.T + bias)[:, 0]
    loss = float(np.mean(np.logaddexp(0.0, logits) - labels * logits))
    grad = ((1.0 / (1.0 + np.exp(-logits)) - labels) / len(labels))[:, None]
    grads: list[Doubles] = []
    for number in reversed(range(len(pairs))):
        grads = [grad.T @ inputs[number], grad.sum(axis=0), *grads]
        grad = grad @ pairs[number][0]
        if number:
            grad *= inputs[number] > 0
    return loss, grad, grads


def _adam(array: Doubles, grad: Doubles, first: Doubles, second: Doubles, step: int) -> None:
    """One step in place."""
    first += (1 - _BETAS[0]) * (grad - first)
    second += (1 - _BETAS[1]) * (grad**2 - second)
    unbiased = np.sqrt(second / (1 - _BETAS[1] ** step)) + _ADAM_EPSILON
    array -= DENSE_RATE * first / (1 - _BETAS[0] ** step) / unbiased
