"""Built-in losses that hold the samples of a batch against one another.

Samples that are the same, by their labels, are never negatives of each other.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus


def similarities(
    one: Tensor, other: Tensor, scale: Tensor | None = None, same: Tensor | None = None
) -> Tensor:
    """Products [B, B] of each with each, -inf of different samples that are the same.

    Args:
        one, other: [B, D], as the model gives them.
        scale: [], of the products.
        same: [B], equal where two samples are the same.

    Raises:
        ValueError: they are not [B, D] both.
    """
    if one.ndim != 2 or one.shape != other.shape:
        raise ValueError(
            f"outputs {list(one.shape)} and {list(other.shape)}; expected two of one shape [B, D]"
        )
    logits = one @ other.T
    if scale is not None:
        logits = scale * logits
    if same is None:
        return logits
    twice = same.unsqueeze(1) == same
    return logits.masked_fill(twice.fill_diagonal_(False), -torch.inf)


def contrastive(logits: Tensor) -> Tensor:
    """The loss of each pair, [B]: the cross-entropy of finding its other half, of both directions.

    As of CLIP (Radford et al., arXiv 2103.00020).

    Args:
        logits: [B, B], `similarities` of the halves of all pairs.
    """
    own = torch.arange(len(logits), device=logits.device)
    there = cross_entropy(logits, own, reduction="none")
    return (there + cross_entropy(logits.T, own, reduction="none")) / 2


def in_batch_softmax(logits: Tensor, frequency: Tensor | None = None) -> Tensor:
    """The loss of each query, [B]: the cross-entropy of finding its item among those of the batch.

    As of Yi et al., "Sampling-bias-corrected neural modeling for large corpus item recommendations"
    (2019): an item is a negative as often as it is in a batch, so the logarithm of its frequency is
    taken off.

    Args:
        logits: [B, B], `similarities` of queries and items.
        frequency: [B] above 0, of the item in what is trained on: a number or a share.
    """
    if frequency is not None:
        logits = logits - frequency.to(logits).log()
    own = torch.arange(len(logits), device=logits.device)
    return cross_entropy(logits, own, reduction="none")


def pairwise(
    scores: Tensor, labels: Tensor, weights: Tensor | None = None, groups: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and total weight of the pairs of which one has a larger label, both [].

    ln(1 + exp(s_j - s_i)) where sample i has the larger label (RankNet, Burges et al. 2005); of no
    pair 0.

    Args:
        scores: [B], or of any shape with as many values.
        labels: [B].
        weights: [B], of a sample; a pair has their product. None: 1.
        groups: [B]; only samples of one are compared. None: all are of one.

    Raises:
        ValueError: there is not a score for each sample.
    """
    if scores.numel() != len(labels):
        raise ValueError(
            f"pairwise: predictions {list(scores.shape)} of {len(labels)} labels; expected one for "
            "each sample"
        )
    scores = scores.reshape(-1)
    above = labels.unsqueeze(1) > labels
    if groups is not None:
        above = above & (groups.unsqueeze(1) == groups)
    better, worse = above.nonzero(as_tuple=True)
    losses = softplus(scores[worse] - scores[better])
    each = torch.ones_like(losses) if weights is None else (weights[better] * weights[worse])
    each = each.to(losses)
    total = each.sum()
    return (each * losses).sum() / total.where(total > 0, torch.ones_like(total)), total
