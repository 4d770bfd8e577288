"""Whether a peer ends with the rows that NumPy computes."""

from typing import Any

import numpy as np

from bench.ps.peers.peer import EPSILON, INITIAL_ACCUMULATOR, LEARNING_RATE, Batch, Floats, Peer

BATCHES = 3
# Sums of thousands of gradients in another order differ by this much at most.
TOLERANCE = 2e-5


def largest_error(peer: Peer) -> float:
    """Push three batches; the largest difference of any weight from the reference."""
    batches = peer.data.workloads["zipf"][:BATCHES]
    prepared = [peer.prepare(batch) for batch in batches]
    before = [peer.read(batch).copy() for batch in prepared]
    for batch in prepared:
        mode = peer.modes("push", False)[0]
        peer.before("push", batch, mode)
        peer.push(batch, mode)
    wanted = _reference(batches, before, peer.optimizer)
    return max(_error(peer, *pair) for pair in zip(prepared, wanted, strict=True))


def _error(peer: Peer, batch: Any, wanted: Floats) -> float:
    return float(np.abs(peer.read(batch) - wanted).max())


def _reference(batches: list[Batch], before: list[Floats], optimizer: str) -> list[Floats]:
    keys = np.concatenate([batch.keys for batch in batches])
    unique, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    weights = np.concatenate(before)[first].astype(np.float64)
    width = weights.shape[1] if optimizer == "adagrad" else 1
    squares = np.full((len(unique), width), INITIAL_ACCUMULATOR)
    parts = np.split(inverse, np.cumsum([len(batch.keys) for batch in batches])[:-1])
    for batch, part in zip(batches, parts, strict=True):
        sums = np.zeros_like(weights)
        np.add.at(sums, part, batch.grads.astype(np.float64))
        square = sums * sums
        squares += square if optimizer == "adagrad" else square.mean(axis=1, keepdims=True)
        weights -= LEARNING_RATE * sums / (np.sqrt(squares) + EPSILON)
    return [weights[part].astype(np.float32) for part in parts]
