"""Remote embedding collections against torch's and TorchRec's dense ones, over real shards."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ps import LocalShards, ParameterClient, ShardError, TableError
from tests.pids import stop
from workers.embedding.collection import RemoteEmbeddingBagCollection, RemoteEmbeddingCollection
from workers.embedding.config import EmbeddingBagConfig, EmbeddingConfig, as_bag_config
from workers.embedding.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from workers.embedding.tables import PREFETCHED, find_features

IDS = 50
needs_torchrec = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None or importlib.util.find_spec("fbgemm_gpu") is None,
    reason="torchrec and fbgemm-gpu-cpu are not installed",
)


@pytest.fixture(scope="module")
def shards() -> Iterator[LocalShards]:
    with LocalShards(2) as running:
        yield running


@pytest.fixture
def client(shards: LocalShards) -> Iterator[ParameterClient]:
    with ParameterClient(shards.addresses, timeout_s=20) as connected:
        yield connected


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Begins the names of this test's tables."""
    return "".join(c if c.isalnum() else "_" for c in request.node.name)


def make_batch(
    seed: int, keys: tuple[str, ...] = ("a", "b", "c"), samples: int = 7, weighted: bool = False
) -> KeyedJaggedTensor:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(keys) * samples,), generator=rng)
    values = torch.randint(0, IDS, (int(lengths.sum()),), generator=rng)
    weights = torch.rand(len(values), generator=rng) if weighted else None
    return KeyedJaggedTensor(keys, values, weights, lengths)


class Dense(nn.Module):
    """The same tables in torch, with the rows that the shards have now."""

    def __init__(self, configs: list[EmbeddingBagConfig], client: ParameterClient) -> None:
        super().__init__()
        self.configs = configs
        self.bags = nn.ModuleDict()
        for config in configs:
            rows = client.pull(config.name, np.arange(IDS), read_only=True)
            self.bags[config.name] = nn.EmbeddingBag.from_pretrained(
                torch.from_numpy(rows), freeze=False, mode=config.pooling, include_last_offset=True
            )

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        parts = []
        for config in self.configs:
            for feature in config.feature_names:
                bag = batch[feature]
                weights = bag.weights_or_none()
                module = self.bags[config.name]
                parts.append(module(bag.values(), bag.offsets(), per_sample_weights=weights))
        return torch.cat(parts, dim=1)


def two_tables(name: str) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=f"{name}_x", embedding_dim=4, feature_names=["b", "a"]),
        EmbeddingBagConfig(
            name=f"{name}_y", embedding_dim=6, feature_names=["c", "a"], pooling="mean"
        ),
    ]


def objective(values: Tensor) -> Tensor:
    """A loss whose gradient depends on the values, and differs by column and sample."""
    weights = torch.linspace(-1, 1, values.numel()).view(values.shape)
    return ((values - weights) ** 2).sum()


OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": ({"learning_rate": 0.1}, partial(torch.optim.SGD, lr=0.1)),
    "adagrad": (
        {"learning_rate": 0.1, "epsilon": 1e-8, "initial_accumulator": 0.2},
        partial(torch.optim.Adagrad, lr=0.1, eps=1e-8, initial_accumulator_value=0.2),
    ),
}


def train_alike(
    remote: RemoteEmbeddingBagCollection,
    dense: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Any,
    values: Any = lambda out: out,
) -> None:
    """Steps of both; outputs agree at every one."""
    for batch in batches:
        theirs, mine = values(dense(batch)), remote(batch).values()
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        optimizer.zero_grad()
        objective(theirs).backward()
        optimizer.step()
        objective(mine).backward()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("staged", [False, True])
def test_trains_like_dense(
    client: ParameterClient, name: str, optimizer: str, staged: bool
) -> None:
    options, make = OPTIMIZERS[optimizer]
    configs = two_tables(name)
    remote = RemoteEmbeddingBagCollection(
        configs, client, optimizer=optimizer, scale=0.5, **options
    )
    dense = Dense(configs, client)
    batches: Any = [make_batch(seed) for seed in range(6)]
    if staged:  # pulls of coming batches wait their turn: nothing may change
        batches = remote.pipelined(batches, depth=2)
    train_alike(remote, dense, make(dense.parameters()), batches)
    remote.flush()
    for config in configs:
        rows = client.pull(config.name, np.arange(IDS), read_only=True)
        weight = dense.bags[config.name].weight.detach()
        torch.testing.assert_close(torch.from_numpy(rows), weight, rtol=1e-5, atol=1e-6)


def test_output_is_keyed_by_feature_and_shared_ones_by_table(
    client: ParameterClient, name: str
) -> None:
    remote = RemoteEmbeddingBagCollection(two_tables(name), client)
    out = remote(make_batch(0, keys=("c", "unused", "b", "a")))
    assert isinstance(out, KeyedTensor)
    assert out.keys() == ["b", f"a@{name}_x", "c", f"a@{name}_y"]
    assert out.length_per_key() == [4, 4, 6, 6]
    assert out.values().shape == (7, 20)
    torch.testing.assert_close(out["c"], out.values()[:, 8:14])
    assert list(out.to_dict()) == out.keys()


def test_weights_multiply_rows_and_get_gradients(client: ParameterClient, name: str) -> None:
    configs = [EmbeddingBagConfig(name=name, embedding_dim=5, feature_names=["a", "b"])]
    remote = RemoteEmbeddingBagCollection(
        configs, client, is_weighted=True, optimizer="sgd", learning_rate=0.1, scale=0.5
    )
    dense = Dense(configs, client)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    train_alike(remote, dense, optimizer, [make_batch(s, ("a", "b"), 7, True) for s in range(3)])
    batch = make_batch(9, ("a", "b"), 7, True)
    weights = batch.weights_or_none()
    assert weights is not None
    grads = []
    for module in (remote, dense):
        own = weights.clone().requires_grad_()
        out = module(KeyedJaggedTensor(["a", "b"], batch.values(), own, batch.lengths()))
        objective(out if isinstance(out, Tensor) else out.values()).backward()
        assert own.grad is not None
        grads.append(own.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6)


def test_weighted_mean_divides_by_the_number_of_values(client: ParameterClient, name: str) -> None:
    config = EmbeddingBagConfig(name=name, embedding_dim=3, feature_names=["a"], pooling="mean")
    remote = RemoteEmbeddingBagCollection([config], client, is_weighted=True, scale=1.0)
    ids, weights = torch.tensor([1, 2, 2]), torch.tensor([0.5, 2.0, 4.0])
    out = remote(KeyedJaggedTensor(["a"], ids, weights, torch.tensor([2, 0, 1])))["a"]
    rows = torch.from_numpy(client.pull(name, ids))
    expected = torch.stack([(0.5 * rows[0] + 2 * rows[1]) / 2, torch.zeros(3), 4 * rows[2]])
    torch.testing.assert_close(out, expected)


def test_unpooled_trains_like_dense(client: ParameterClient, name: str) -> None:
    config = EmbeddingConfig(name=name, embedding_dim=4, feature_names=["a", "b"])
    remote = RemoteEmbeddingCollection(
        [config], client, need_indices=True, optimizer="sgd", learning_rate=0.1, scale=0.5
    )
    dense = nn.Embedding.from_pretrained(
        torch.from_numpy(client.pull(name, np.arange(IDS))), freeze=False
    )
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    for seed in range(4):
        batch = make_batch(seed, ("a", "b"))
        out = remote(batch)
        assert isinstance(out["a"], JaggedTensor)
        for feature in ("a", "b"):
            bag = batch[feature]
            torch.testing.assert_close(out[feature].values(), dense(bag.values()))
            torch.testing.assert_close(out[feature].lengths(), bag.lengths())
            torch.testing.assert_close(out[feature].weights_or_none(), bag.values())
        mine = torch.cat([out["a"].values(), out["b"].values()])
        optimizer.zero_grad()
        objective(dense(batch.values())).backward()
        optimizer.step()
        objective(mine).backward()


def test_keys_are_any_64_bit_integers(client: ParameterClient, name: str) -> None:
    config = EmbeddingBagConfig(name=name, embedding_dim=2, feature_names=["a"])
    remote = RemoteEmbeddingBagCollection([config], client, scale=1.0)
    ids = torch.tensor([-1, 2**63 - 1, -(2**63), 0])
    out = remote(KeyedJaggedTensor(["a"], ids, lengths=torch.ones(4, dtype=torch.int32))).values()
    torch.testing.assert_close(out, torch.from_numpy(client.pull(name, ids)))


@pytest.mark.parametrize("samples", [0, 3])
def test_batches_without_ids(client: ParameterClient, name: str, samples: int) -> None:
    remote = RemoteEmbeddingBagCollection(two_tables(name), client)
    empty = torch.empty(0, dtype=torch.int64)
    lengths = torch.zeros(3 * samples, dtype=torch.int64)
    out = remote(KeyedJaggedTensor(["a", "b", "c"], empty, lengths=lengths)).values()
    torch.testing.assert_close(out, torch.zeros(samples, 20))
    out.sum().backward()
    remote.flush()


def rows_of(client: ParameterClient, table: str) -> int:
    return sum(t.rows for shard in client.stats() for t in shard.tables if t.name == table)


def test_looking_makes_no_rows(client: ParameterClient, name: str) -> None:
    config = EmbeddingBagConfig(name=name, embedding_dim=2, feature_names=["a"])
    remote = RemoteEmbeddingBagCollection([config], client, scale=1.0)
    batch = make_batch(0, ("a",))
    with torch.no_grad():
        first = remote(batch).values()
    remote.eval()
    out = remote(batch).values()
    assert not out.requires_grad
    assert rows_of(client, name) == 0
    remote.train()
    again = remote(batch).values()
    assert again.requires_grad
    torch.testing.assert_close(first, again)
    assert rows_of(client, name) == 0
    again.sum().backward()
    remote.flush()
    assert rows_of(client, name) == len(batch.values().unique())


def test_checkpoint_holds_every_gradient_so_far(
    client: ParameterClient, name: str, tmp_path: Path
) -> None:
    remote = RemoteEmbeddingBagCollection(two_tables(name), client, scale=1.0)
    assert remote.state_dict() == {}
    assert list(remote.parameters()) == []
    assert [t.name for t in remote.tables] == [f"{name}_x", f"{name}_y"]
    batch = make_batch(0)
    objective(remote(batch).values()).backward()
    remote.save(tmp_path / "saved")
    saved = remote(batch).values()
    objective(saved).backward()
    remote.flush()
    with torch.no_grad():
        assert not torch.equal(remote(batch).values(), saved)
    remote.prefetch(batch)
    pulls = remote._prefetched[0].batch.pulls
    assert pulls is not None
    pulls[0].result(20)  # rows from before the load
    assert remote.load(tmp_path / "saved") > 0
    torch.testing.assert_close(remote(batch).values(), saved)


def counting(client: ParameterClient, name: str, **options: Any) -> RemoteEmbeddingBagCollection:
    """A table of zeros from which every backward of `out.sum()` takes one for each value."""
    config = EmbeddingBagConfig(name=name, embedding_dim=1, feature_names=["a"])
    return RemoteEmbeddingBagCollection(
        [config], client, optimizer="sgd", learning_rate=1.0, initializer="zeros", **options
    )


def one_key() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a"], torch.tensor([5]), lengths=torch.tensor([1]))


def test_prefetched_rows_are_as_stale_as_allowed(client: ParameterClient, name: str) -> None:
    remote = counting(client, name, max_staleness=1)
    first, second, third = one_key(), one_key(), one_key()
    out = remote(first).values()
    remote.prefetch(second)
    remote.prefetch(third)  # would lack two: waits until the first is applied
    ahead, behind = (asked.batch for asked in remote._prefetched)
    assert ahead.pulls is not None
    ahead.pulls[0].result(20)
    assert behind.pulls is None
    out.sum().backward()
    remote.flush()
    assert behind.pulls is not None
    assert behind.pulls[0].result(20).item() == -1
    assert remote(second).values().item() == 0
    assert remote(third).values().item() == -1


def test_without_staleness_a_prefetch_waits_for_the_backward(
    client: ParameterClient, name: str
) -> None:
    remote = counting(client, name)
    first, second = one_key(), one_key()
    out = remote(first).values()
    remote.prefetch(second)
    assert remote._prefetched[0].batch.pulls is None
    out.sum().backward()
    assert remote(second).values().item() == -1


def test_a_late_backward_is_waited_for(
    shards: LocalShards, client: ParameterClient, name: str
) -> None:
    remote = counting(client, name, max_staleness=1)
    late = remote(one_key()).values()
    remote(one_key())
    for shard in shards.processes:
        stop(shard.pid)
    try:
        late.sum().backward()
        last = one_key()
        remote.prefetch(last)  # would lack two: of the late one, and of the one still to come
        assert remote._prefetched[0].batch.pulls is None
    finally:
        for shard in shards.processes:
            os.kill(shard.pid, signal.SIGCONT)
    assert remote(last).values().item() == -1


def test_batches_may_be_taken_out_of_order(client: ParameterClient, name: str) -> None:
    remote = counting(client, name, max_staleness=1)
    first, second, third, fourth = (one_key() for _ in range(4))
    remote.prefetch(first)
    remote.prefetch(second)
    remote(second).values().sum().backward()
    remote.flush()
    out = remote(first).values()
    remote.prefetch(third)
    remote.prefetch(fourth)  # would lack two
    assert [asked.batch.pulls is None for asked in remote._prefetched] == [False, True]
    out.sum().backward()
    remote.flush()  # else the fourth may lack this one
    remote(third)
    assert remote(fourth).values().item() == -2


def test_deep_pipeline_loses_no_gradient(client: ParameterClient, name: str) -> None:
    remote = counting(client, name, max_staleness=2)
    batches = [make_batch(seed, ("a",)) for seed in range(30)]
    seen = 0
    for batch in remote.pipelined(batches, depth=4):
        assert batch is batches[seen]
        remote(batch).values().sum().backward()
        seen += 1
    remote.flush()
    assert seen == len(batches)
    values = torch.cat([batch.values() for batch in batches])
    rows = client.pull(name, np.arange(IDS)).ravel()
    np.testing.assert_array_equal(-rows, values.bincount(minlength=IDS).numpy())


def test_backwards_that_never_come_or_come_late_hold_nothing_up(
    client: ParameterClient, name: str
) -> None:
    remote = counting(client, name)
    remote(one_key())  # discarded
    one, two = remote(one_key()).values(), remote(one_key()).values()  # accumulated
    (one + two).sum().backward()
    assert remote(one_key()).values().item() == -2
    again = remote(one_key()).values().sum()
    again.backward(retain_graph=True)
    again.backward()
    assert remote(one_key()).values().item() == -4
    dense = torch.ones((), requires_grad=True)
    loss = (remote(one_key()).values() * dense).sum()
    torch.autograd.grad(loss, [dense])  # not asked for the rows' gradients
    remote.flush()
    assert remote(one_key()).values().item() == -4


def test_tables_that_the_loss_does_not_use_get_no_push(client: ParameterClient, name: str) -> None:
    tables = [EmbeddingConfig(name=f"{name}_{f}", embedding_dim=3, feature_names=[f]) for f in "ab"]
    # Adam's weight decay moves a row even by a gradient of zero.
    options = {"optimizer": "adam", "options": {"weight_decay": 0.5}, "scale": 1.0}
    remote = RemoteEmbeddingCollection([replace(t, **options) for t in tables], client)
    batch = make_batch(0, ("a", "b"))
    before = remote(batch)
    before["b"].values().sum().backward()
    after = remote(batch)
    assert torch.equal(after["a"].values(), before["a"].values())
    assert not torch.equal(after["b"].values(), before["b"].values())


def test_leaving_a_pipeline_forgets_what_was_prefetched(client: ParameterClient, name: str) -> None:
    remote = counting(client, name)
    for batch in remote.pipelined([one_key() for _ in range(5)], depth=3):
        remote(batch).values().sum().backward()
        break
    assert remote._prefetched == []
    assert remote(one_key()).values().item() == -1


def test_prefetching_what_forward_never_gets_is_an_error(
    client: ParameterClient, name: str
) -> None:
    remote = counting(client, name)
    for _ in range(PREFETCHED):
        remote.prefetch(one_key())
    with pytest.raises(RuntimeError, match="very objects that were prefetched"):
        remote.prefetch(one_key())


def test_pipelined_finds_the_features() -> None:
    batch, label = one_key(), torch.zeros(1)
    for whole in (batch, (label, batch), {"x": batch, "y": label}):
        assert find_features(whole) is batch
    assert find_features(SimpleNamespace(sparse_features=batch)) is batch
    for wrong in (label, (label,), (batch, one_key()), {}, 3):
        with pytest.raises(TypeError, match=r"with \d KeyedJaggedTensors; expected one"):
            find_features(wrong)


def test_gradients_that_are_not_finite_are_refused(client: ParameterClient, name: str) -> None:
    remote = counting(client, name)
    out = remote(one_key()).values()
    with pytest.raises(TableError, match="5"):
        (out * float("inf")).sum().backward()
    assert remote(one_key()).values().item() == 0


def test_a_lost_push_is_told() -> None:
    with LocalShards(2) as own, ParameterClient(own.addresses, timeout_s=1) as client:
        remote = counting(client, "lost")
        batch = KeyedJaggedTensor(["a"], torch.arange(20), lengths=torch.tensor([20]))
        out = remote(batch).values()
        own.processes[1].stop()
        out.sum().backward()
        with pytest.raises(ShardError):
            remote.flush()
        remote.flush()  # told once
        with pytest.raises(ShardError):
            remote(batch)


def bag(**changes: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(**{"name": "t", "embedding_dim": 2, **changes})


def like_torchrec(**changes: Any) -> SimpleNamespace:
    fields = {"name": "t", "embedding_dim": 2, "feature_names": ["a"], "num_embeddings": 100}
    return SimpleNamespace(**{**fields, "pooling": SimpleNamespace(value="MEAN"), **changes})


def test_configs() -> None:
    assert bag().feature_names == ("t",)
    assert bag(num_embeddings=100).table_options({"optimizer": "adam"}) == {
        "optimizer": "adam",
        "initializer": "uniform",
        "scale": pytest.approx(0.1),
    }
    own = bag(num_embeddings=100, learning_rate=1.0, options={"seed": 3})
    assert own.table_options({"learning_rate": 2.0, "scale": 0.5}) == {
        "learning_rate": 1.0,
        "scale": 0.5,
        "seed": 3,
    }
    theirs = as_bag_config(like_torchrec())
    assert (theirs.pooling, theirs.feature_names) == ("mean", ("a",))
    for function, expected in (
        (partial(nn.init.uniform_, a=-0.5, b=0.5), ("uniform", 0.5)),
        (partial(nn.init.normal_, std=0.1), ("normal", 0.1)),
        (nn.init.zeros_, ("zeros", None)),
    ):
        config = as_bag_config(like_torchrec(init_fn=function))
        assert (config.initializer, config.scale) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bag(pooling="max"), "pooling='max'; expected sum or mean"),
        (lambda: bag(feature_names="ab"), "feature_names='ab'; expected a list"),
        (lambda: bag(feature_names=["a", "a"]), "expected distinct names"),
        (lambda: as_bag_config(3), "int; expected an EmbeddingBagConfig"),
        (
            lambda: as_bag_config(EmbeddingConfig(name="t", embedding_dim=2)),
            "EmbeddingConfig has no pooling",
        ),
        (
            lambda: as_bag_config(like_torchrec(init_fn=nn.init.uniform_)),
            r"uniform in \[0, 1\); the shards make",
        ),
        (lambda: as_bag_config(like_torchrec(init_fn=nn.init.ones_)), "'t': initial values"),
        (lambda: KeyedJaggedTensor(["a"], torch.arange(3)), "either lengths or offsets"),
        (
            lambda: KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([3])),
            "1 bags; expected a multiple of 2",
        ),
        (
            lambda: KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([2])).to_dict(),
            "3 values; expected 2",
        ),
        (
            lambda: KeyedJaggedTensor(
                ["a"], torch.arange(3), torch.ones(2), lengths=torch.tensor([3])
            ),
            r"weights: shape \[2\]",
        ),
    ],
)
def test_wrong_configs_and_batches(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_wrong_arguments(client: ParameterClient, name: str) -> None:
    make = partial(RemoteEmbeddingBagCollection, client=client)
    with pytest.raises(ValueError, match="expected one or more, of distinct names"):
        make([bag(), bag()])
    with pytest.raises(ValueError, match="max_staleness=-1; expected"):
        make([bag()], max_staleness=-1)
    with pytest.raises(TableError, match="optimizer"):
        make([bag(name=name)], optimizer="sdg")
    remote = make([bag(name=name, feature_names=["z"])], is_weighted=True)
    with pytest.raises(ValueError, match="feature 'z' is not in the batch; it has a"):
        remote(one_key())
    with pytest.raises(ValueError, match="feature 'z': no weights"):
        remote(KeyedJaggedTensor(["z"], torch.tensor([1]), lengths=torch.tensor([1])))
    with pytest.raises(ValueError, match=r"ids: torch\.float32; expected int64"):
        remote(KeyedJaggedTensor(["z"], torch.ones(1), torch.ones(1), torch.tensor([1])))


def to_torchrec(batch: KeyedJaggedTensor) -> Any:
    from torchrec import KeyedJaggedTensor as TheirBatch

    weights = batch.weights_or_none()
    return TheirBatch(batch.keys(), batch.values(), weights=weights, lengths=batch.lengths())


def torchrec_tables(name: str, kind: Any, **fields: Any) -> list[Any]:
    pairs = (("x", ["b", "a"]), ("y", ["c", "a"]))
    return [
        kind(
            num_embeddings=IDS, embedding_dim=4, name=f"{name}_{table}", feature_names=own, **fields
        )
        for table, own in pairs
    ]


def copy_rows(client: ParameterClient, modules: nn.ModuleDict) -> None:
    for table, module in modules.items():
        rows = torch.from_numpy(client.pull(table, np.arange(IDS), read_only=True))
        assert rows.abs().max() < IDS**-0.5  # as TorchRec draws them
        assert rows.abs().max() > 0.9 * IDS**-0.5
        with torch.no_grad():
            module.weight.copy_(rows)


@needs_torchrec
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_like_torchrec(
    client: ParameterClient, name: str, weighted: bool, optimizer: str
) -> None:
    import torchrec

    options, make = OPTIMIZERS[optimizer]
    pooling = torchrec.PoolingType.SUM if weighted else torchrec.PoolingType.MEAN
    tables = torchrec_tables(name, torchrec.EmbeddingBagConfig, pooling=pooling)
    dense = torchrec.EmbeddingBagCollection(tables, is_weighted=weighted)
    remote = RemoteEmbeddingBagCollection(
        tables, client, is_weighted=weighted, optimizer=optimizer, **options
    )
    copy_rows(client, dense.embedding_bags)
    order = ("c", "a", "unused", "b")
    batches = [to_torchrec(make_batch(seed, order, 7, weighted)) for seed in range(6)]
    mine, theirs = remote(batches[0]), dense(batches[0])
    assert type(mine) is type(theirs)
    assert mine.keys() == theirs.keys()
    assert mine.length_per_key() == theirs.length_per_key()
    train_alike(
        remote,
        dense,
        make(dense.parameters()),
        remote.pipelined(batches),
        lambda out: out.values(),
    )


@needs_torchrec
def test_torchrec_features_that_hold_equal_samples_once(client: ParameterClient, name: str) -> None:
    import torchrec

    tables = torchrec_tables(name, torchrec.EmbeddingBagConfig)
    dense = torchrec.EmbeddingBagCollection(tables)
    remote = RemoteEmbeddingBagCollection(tables, client)
    copy_rows(client, dense.embedding_bags)
    batch = torchrec.KeyedJaggedTensor(
        ["a", "b", "c"],
        torch.arange(9),
        lengths=torch.tensor([2, 1, 1, 0, 3, 2]),
        stride_per_key_per_rank=[[2], [1], [3]],
        inverse_indices=(["a", "b", "c"], torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [2, 1, 0, 1]])),
    )
    torch.testing.assert_close(remote(batch).values(), dense(batch).values())


@needs_torchrec
def test_unpooled_like_torchrec(client: ParameterClient, name: str) -> None:
    import torchrec

    tables = torchrec_tables(name, torchrec.EmbeddingConfig)
    dense = torchrec.EmbeddingCollection(tables)
    remote = RemoteEmbeddingCollection(tables, client)
    copy_rows(client, dense.embeddings)
    batch = to_torchrec(make_batch(0))
    mine, theirs = remote(batch), dense(batch)
    assert list(mine) == list(theirs)
    for key, expected in theirs.items():
        assert type(mine[key]) is type(expected)
        torch.testing.assert_close(mine[key].values(), expected.values())
        torch.testing.assert_close(mine[key].lengths(), expected.lengths())
