"""The losses that a job may name: how predictions are held against labels."""

import math
from collections.abc import Callable
from typing import Final

from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
_NONE = -1  # for a token that does not count


def loss_function(name: str) -> Loss:
    """The mean loss of predictions against labels, as of `sample_losses`."""
    return lambda predictions, labels: sample_losses(name, predictions, labels).mean()


def sample_losses(name: str, predictions: Tensor, labels: Tensor) -> Tensor:
    """The loss of each sample [B].

    Args:
        name: as in a job's `train.loss`; empty for bce_with_logits.
        predictions: [B], or of any shape with as many values; logits [B, C] of cross_entropy,
            [B, L, V] of next_token.
        labels: [B], or [B, …] where each sample has several: its loss is the mean over those that
            count, and predictions have their shape; NaN does not count. Of cross_entropy they are
            whole numbers below C, of next_token token ids [B, L] below V; -1 does not count.

    Raises:
        ValueError: predictions and labels do not fit one another.
    """
    if name in ("next_token", "cross_entropy"):
        return _of_classes(name, predictions, labels)
    function = _OF_VALUES[name or BINARY]
    if labels.ndim > 1:
        return _of_several(name or BINARY, function, predictions, labels)
    if predictions.numel() != labels.numel():
        raise ValueError(
            f"{name or BINARY}: predictions {list(predictions.shape)} of {len(labels)} labels; "
            "expected one for each sample"
        )
    return function(predictions.reshape(-1), labels.to(predictions.dtype))


def counted(labels: Tensor) -> Tensor:
    """How many values of each sample count, int64 [B], of labels [B, …]."""
    return _there(labels).flatten(1).sum(dim=1)


def predicted(name: str, outputs: Tensor) -> Tensor:
    """What the outputs of a model that learns by a loss say: of logits the probabilities.

    Args:
        name: as in `sample_losses`.
    """
    if name in ("next_token", "cross_entropy"):
        return outputs.float().softmax(dim=-1)
    return outputs.float().sigmoid() if (name or BINARY) == BINARY else outputs


def held_out(name: str, predictions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What metrics need of a batch: float32 score and label of each sample, [B] and [B].

    Of `next_token` the score is a sample's mean loss, and the label its number of tokens; of
    `cross_entropy` its loss, and whether its class has the largest logit. Of labels [B, …] both
    have this shape, and the latter is NaN where nothing counts.
    """
    if name == "next_token":
        losses = sample_losses(name, predictions.float(), labels)
        return losses, counted(labels).to(losses)
    if name == "cross_entropy":
        losses = _class_losses(name, predictions.float(), labels)
        right = (predictions.argmax(dim=-1) == labels).float()
        return losses, right.masked_fill(~_there(labels), math.nan)
    if labels.ndim > 1:
        return _alike(name, predictions, labels).float(), labels.float()
    return predictions.reshape(-1).float(), labels.float()


def _there(labels: Tensor) -> Tensor:
    return ~labels.isnan() if labels.is_floating_point() else labels >= 0


def _alike(name: str, predictions: Tensor, labels: Tensor) -> Tensor:
    if predictions.shape not in (labels.shape, (*labels.shape, 1)):
        raise ValueError(
            f"{name}: predictions {list(predictions.shape)} for labels {list(labels.shape)}; "
            "expected one for each value"
        )
    return predictions.reshape(labels.shape)


def _of_several(name: str, function: Loss, predictions: Tensor, labels: Tensor) -> Tensor:
    there = _there(labels)
    # What does not count has no gradient, not even where it is not finite.
    given = _alike(name, predictions, labels).masked_fill(~there, 0)
    wanted = labels.to(predictions.dtype).masked_fill(~there, 0)
    losses = function(given, wanted).masked_fill(~there, 0)
    return losses.flatten(1).sum(dim=1) / counted(labels).clamp(min=1)


def _of_classes(name: str, logits: Tensor, labels: Tensor) -> Tensor:
    losses = _class_losses(name, logits, labels)
    if losses.ndim == 1:
        return losses
    return losses.flatten(1).sum(dim=1) / counted(labels).clamp(min=1)


def _class_losses(name: str, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each label, 0 where none counts."""
    fits = logits.ndim == labels.ndim + 1 and logits.shape[:-1] == labels.shape
    if not fits:
        raise ValueError(
            f"{name}: predictions {list(logits.shape)} for labels {list(labels.shape)}; expected "
            "the logits of every class beside each label"
        )
    # A GPU would have to be waited for; it ends the process on such a label by itself.
    if labels.device.type == "cpu" and len(labels) and int(labels.max()) >= logits.shape[-1]:
        raise ValueError(
            f"{name}: label {int(labels.max())}; expected less than the {logits.shape[-1]} logits"
        )
    return nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=_NONE, reduction="none"
    ).view(labels.shape)


def _binary(predictions: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(predictions, labels, reduction="none")


BINARY: Final = "bce_with_logits"
_OF_VALUES: Final[dict[str, Loss]] = {
    BINARY: _binary,
    "mse": lambda predictions, labels: (predictions - labels).square(),
    "mae": lambda predictions, labels: (predictions - labels).abs(),
    "huber": lambda predictions, labels: nn.functional.huber_loss(
        predictions, labels, reduction="none"
    ),
}
