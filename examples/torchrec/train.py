"""A click model on TorchRec's features, its embedding tables on two parameter-server shards.

    python train.py

Uses TorchRec's KeyedJaggedTensor where it is installed, and HeterPS's where it is not.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps import EmbeddingBagConfig, RemoteEmbeddingBagCollection
from ps import LocalShards, ParameterClient

try:
    from torchrec import KeyedJaggedTensor
except ImportError:
    from heterps import KeyedJaggedTensor

USERS, GENRES, SAMPLES, STEPS = 2000, 30, 512, 300


class Model(nn.Module):
    """Pooled embeddings, side by side, through a small tower; a logit for each sample."""

    def __init__(self, embeddings: RemoteEmbeddingBagCollection) -> None:
        super().__init__()
        self.embeddings = embeddings
        width = sum(t.embedding_dim * len(t.feature_names) for t in embeddings.tables)
        self.tower = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.tower(self.embeddings(features).values()).squeeze(1)


def batches(steps: int, seed: int) -> Iterator[tuple[KeyedJaggedTensor, Tensor]]:
    """Users, with 1 to 5 genres each; a click where most genres are of the user's kind."""
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        user = torch.randint(USERS, (SAMPLES,), generator=rng)
        count = torch.randint(1, 6, (SAMPLES,), generator=rng)
        genres = torch.randint(GENRES, (int(count.sum()),), generator=rng)
        sample = torch.arange(SAMPLES).repeat_interleave(count)
        liked = torch.zeros(SAMPLES).index_add(0, sample, (user[sample] % 2 == genres % 2).float())
        clicked = (2 * liked > count).float()
        features = KeyedJaggedTensor(
            keys=["user", "genres"],
            values=torch.cat([user * 1_000_003, genres]),  # ids need not be dense
            lengths=torch.cat([torch.ones_like(count), count]),
        )
        yield features, clicked


def main() -> None:
    torch.manual_seed(0)
    with LocalShards(2) as shards, ParameterClient(shards.addresses) as client:
        embeddings = RemoteEmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="user", embedding_dim=16, feature_names=["user"]),
                EmbeddingBagConfig(name="genre", embedding_dim=8, feature_names=["genres"]),
            ],
            client=client,
            max_staleness=1,  # the next batch's rows travel while this one is computed
            optimizer="adagrad",
            learning_rate=0.1,
        )
        model = Model(embeddings)
        optimizer = torch.optim.Adam(model.tower.parameters(), lr=0.003)
        for step, (features, clicked) in enumerate(embeddings.pipelined(batches(STEPS, seed=0))):
            loss = F.binary_cross_entropy_with_logits(model(features), clicked)
            optimizer.zero_grad()
            loss.backward()  # sends the rows' gradients
            optimizer.step()
            if step % 50 == 0:
                print(f"step {step:3}  loss {loss.item():.3f}")
        embeddings.flush()

        model.eval()  # reads rows, makes none
        with torch.no_grad():
            hits = [((model(f) > 0) == c.bool()).float().mean() for f, c in batches(10, seed=1)]
        rows = sum(table.rows for shard in client.stats() for table in shard.tables)
        print(f"accuracy on new samples {torch.stack(hits).mean():.3f}  rows {rows}")


if __name__ == "__main__":
    main()
