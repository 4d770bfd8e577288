"""Built-in losses of whole batches against their definitions, pair by pair."""

import math

import pytest
import torch

from workers.learning.batch_losses import contrastive, in_batch_softmax, pairwise, similarities

B, D = 7, 3
SAME = torch.tensor([4, 1, 4, 2, 4, 3, 1])
SCALE = torch.tensor(1.7)


@pytest.fixture
def pairs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, D, generator=generator, dtype=torch.float64) for _ in range(2)]


def nats(own, all_of_them):
    """-ln of a share, given logits."""
    return math.log(sum(math.exp(one) for one in all_of_them)) - own


def others(sample, same):
    """The sample itself, and those that are another one."""
    return [j for j in range(B) if j == sample or same is None or same[j] != same[sample]]


@pytest.mark.parametrize("same", [None, SAME])
@pytest.mark.parametrize("scale", [None, SCALE])
def test_contrastive_finds_the_other_half_in_both_directions(pairs, same, scale):
    one, other = pairs
    found = contrastive(similarities(one, other, scale, same))
    factor = 1.0 if scale is None else 1.7
    for i in range(B):
        there = [factor * float(one[i] @ other[j]) for j in others(i, same)]
        back = [factor * float(one[j] @ other[i]) for j in others(i, same)]
        own = factor * float(one[i] @ other[i])
        assert float(found[i]) == pytest.approx((nats(own, there) + nats(own, back)) / 2, rel=1e-6)


@pytest.mark.parametrize("frequency", [None, torch.tensor([5.0, 1, 5, 2, 5, 3, 1])])
def test_in_batch_softmax_leaves_out_the_same_item_and_takes_off_its_frequency(pairs, frequency):
    query, item = pairs
    logits = similarities(query, item, SCALE, SAME)
    found = in_batch_softmax(logits, frequency)
    for i in range(B):
        expected = {
            j: 1.7 * float(query[i] @ item[j])
            - (0.0 if frequency is None else math.log(frequency[j]))
            for j in others(i, SAME)
        }
        assert float(found[i]) == pytest.approx(nats(expected[i], expected.values()), rel=1e-6)
    if frequency is not None:  # a share does as well as a number
        torch.testing.assert_close(in_batch_softmax(logits, frequency / 100), found)


def test_an_item_is_learned_by_its_frequency_corrected_score():
    """Of uniform logits the corrected softmax is that of drawing by frequency."""
    found = in_batch_softmax(torch.zeros(2, 2), torch.tensor([3.0, 1.0]))
    assert found.tolist() == pytest.approx([-math.log(1 / 4), -math.log(3 / 4)])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_pairwise_is_the_mean_over_pairs(weighted, grouped):
    scores, labels = torch.tensor([0.3, -1.0, 2.0, 0.3, 0.1]), torch.tensor([2.0, 0, 1, 1, 2])
    weights, groups = torch.tensor([1.0, 2.0, 0.0, 0.5, 3.0]), torch.tensor([0, 0, 1, 1, 0])
    total = every = 0.0
    for i in range(5):
        for j in range(5):
            if labels[i] > labels[j] and not (grouped and groups[i] != groups[j]):
                weight = float(weights[i] * weights[j]) if weighted else 1.0
                total += weight * math.log1p(math.exp(float(scores[j] - scores[i])))
                every += weight
    given = scores.unsqueeze(1).requires_grad_()
    mean, weight = pairwise(
        given, labels, weights if weighted else None, groups if grouped else None
    )
    assert (mean.item(), weight.item()) == pytest.approx((total / every, every))
    mean.backward()
    assert given.grad.isfinite().all()


def test_without_a_pair_there_is_nothing_to_learn():
    scores = torch.tensor([0.3, -1.0], requires_grad=True)
    mean, weight = pairwise(scores, torch.tensor([1.0, 1.0]))
    assert (mean.item(), weight.item()) == (0.0, 0.0)
    mean.backward()
    assert scores.grad.tolist() == [0.0, 0.0]


def test_outputs_that_do_not_go_together_are_named():
    with pytest.raises(ValueError, match=r"\[2, 3\] and \[2, 4\]; expected two of one shape"):
        similarities(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"\[2, 3\] of 2 labels"):
        pairwise(torch.zeros(2, 3), torch.zeros(2))
