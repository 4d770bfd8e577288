"""What a job's `train.loss` names: how predictions are held against labels."""

from collections.abc import Callable

from torch import Tensor, nn


def loss_function(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean loss of predictions against labels, both [B]; of `next_token`, [B, L, V] and [B, L].

    Labels of `next_token` are token ids below V, and predictions their logits.
    """
    if name == "mse":
        return lambda predictions, labels: nn.functional.mse_loss(predictions.reshape(-1), labels)
    if name == "next_token":
        return lambda predictions, labels: nn.functional.cross_entropy(
            predictions.flatten(0, -2), labels.flatten()
        )
    return lambda predictions, labels: nn.functional.binary_cross_entropy_with_logits(
        predictions.reshape(-1), labels
    )


def held_out(name: str, predictions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What metrics need of a batch: float32 score and label of each sample, [B] and [B].

    Of `next_token` the score is a sample's mean loss, and the label its number of tokens.
    """
    if name != "next_token":
        return predictions.reshape(-1).float(), labels
    samples, length = labels.shape
    losses = nn.functional.cross_entropy(
        predictions.float().transpose(1, 2), labels, reduction="none"
    )
    return losses.mean(dim=1), losses.new_full((samples,), length)
