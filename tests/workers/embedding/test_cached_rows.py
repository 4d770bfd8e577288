"""A cached table against the same training without a cache, over real shards."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import ps
from workers.embedding.cached_rows import CachedRows, counters

DIM = 4


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Keys, some of them hot and some repeated, and a gradient for each."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(steps):
        keys = (torch.randn(40, generator=generator) * 30).long()
        made.append((keys, torch.randn(40, DIM, generator=generator)))
    return made


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize(("optimizer", "back"), [("sgd", True), ("sgd", False), ("adagrad", False)])
def test_equals_training_without_a_cache(
    tmp_path: Path, policy: str, optimizer: str, back: bool
) -> None:
    with (
        ps.LocalShards(2, directory=tmp_path) as shards,
        ps.ParameterClient(shards.addresses) as client,
    ):
        for name in ("plain", "cached"):
            client.create_table(name, DIM, optimizer=optimizer, learning_rate=0.1, seed=5)
        rate = 0.1 if back else None
        rows = CachedRows(
            client,
            "cached",
            DIM,
            24,
            ways=4,
            policy=policy,
            learning_rate=rate,  # type: ignore[arg-type]
        )
        made = batches(12)
        for step, (keys, grads) in enumerate(made):
            expected = torch.from_numpy(np.array(client.pull("plain", keys.numpy())))
            torch.testing.assert_close(rows.pull(keys), expected, rtol=1e-5, atol=1e-5)
            client.push("plain", keys.numpy(), grads.numpy())
            if step % 2 and step + 1 < len(made):  # pulled before this gradient, or not at all
                rows.prefetch(made[step + 1][0])
            rows.push(keys, grads)
        assert rows.cache.hits > 50
        assert rows.cache.misses > 50
        assert (rows.written_back > 0) == back
        rows.close()
        assert counters(rows)["hits"] == rows.cache.hits
        every = torch.cat([keys for keys, _ in made]).unique().numpy()
        np.testing.assert_allclose(
            client.pull("cached", every), client.pull("plain", every), rtol=1e-5, atol=1e-5
        )


def test_refuses_a_rate() -> None:
    with pytest.raises(ValueError, match="learning_rate: expected above 0, got 0"):
        CachedRows(None, "t", 4, 8, learning_rate=0.0)  # type: ignore[arg-type]
