"""Dense parameters: cut, initialized once, trained like torch trains them, moved like rows."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ps import LocalShards, ParameterClient, TableError
from ps.client.dense import DenseParameters, DensePushPull

torch = pytest.importorskip("torch")
SHAPES = {"a.weight": (7, 5), "a.bias": (5,), "scale": (), "empty": (0, 3), "b": (40,)}


def arrays(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {k: draw.standard_normal(shape).astype(np.float32) for k, shape in SHAPES.items()}


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert found[key].dtype == np.float32
        np.testing.assert_array_equal(found[key], value)


def test_values_come_back_in_their_shapes_as_views_of_one_buffer(client: ParameterClient) -> None:
    dense = DenseParameters(client, "dense.shapes", SHAPES, block=16)
    assert dense.initialize(arrays(1))
    found = dense.pull()
    same(found, arrays(1))
    assert len({id(v.base if v.base.base is None else v.base.base) for v in found.values()}) == 1
    rows = [t.rows for s in client.stats() for t in s.tables if t.name == "dense.shapes"]
    assert sum(rows) == 6  # of 81 floats
    assert sum(r > 0 for r in rows) > 1, "the blocks are spread over the shards"


@pytest.mark.parametrize(
    ("kind", "options", "make"),
    [
        ("sgd", {}, lambda p: torch.optim.SGD(p, lr=0.1)),
        ("momentum", {"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("adam", {}, lambda p: torch.optim.Adam(p, lr=0.1)),
        ("adagrad", {}, lambda p: torch.optim.Adagrad(p, lr=0.1)),
    ],
)
def test_it_trains_as_torch_does(client: ParameterClient, kind: str, options: dict, make) -> None:
    dense = DenseParameters(
        client, f"dense.{kind}", SHAPES, optimizer=kind, learning_rate=0.1, block=16, **options
    )
    dense.initialize(arrays(2))
    parameters = {k: torch.from_numpy(v.copy()).requires_grad_() for k, v in arrays(2).items()}
    optimizer = make(parameters.values())
    for step in range(5):
        grads = arrays(100 + step)
        for key, parameter in parameters.items():
            parameter.grad = torch.from_numpy(grads[key].copy())
        optimizer.step()
        if step % 2:
            dense.push(grads)
        else:
            future = dense.push_async({k: p.grad for k, p in parameters.items()})
            for parameter in parameters.values():
                parameter.grad.zero_()  # the caller's again
            future.result()
    for key, value in dense.pull().items():
        np.testing.assert_allclose(value, parameters[key].detach().numpy(), rtol=2e-5, atol=2e-6)


def test_of_workers_that_initialize_together_one_wins_whole(shards: LocalShards) -> None:
    big = {"w": (60, 1000)}
    start = threading.Barrier(4)

    def worker(number: int) -> tuple[bool, np.ndarray]:
        with ParameterClient(shards.addresses) as own:
            dense = DenseParameters(own, "dense.race", big, block=64)
            start.wait()
            won = dense.initialize({"w": np.full((60, 1000), number, np.float32)})
            return won, dense.pull()["w"]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(worker, range(4)))
    (winner,) = [number for number, (won, _) in enumerate(results) if won]
    for _, values in results:
        assert (values == winner).all()


def test_a_later_worker_takes_what_is_there(client: ParameterClient) -> None:
    first = DenseParameters(client, "dense.late", SHAPES, block=16, optimizer="sgd")
    first.initialize(arrays(3))
    first.push(arrays(4))
    trained = first.pull()
    late = DenseParameters(client, "dense.late", SHAPES, block=16, optimizer="sgd")
    assert not late.initialize(arrays(5))
    same(late.pull(), trained)
    assert late.initialize(arrays(5), only_if_new=False)
    same(first.pull(), arrays(5))


def test_a_worker_that_began_and_died_is_told(client: ParameterClient) -> None:
    dense = DenseParameters(client, "dense.dead", SHAPES, block=16)
    assert dense._claim_initialization()  # and then it dies
    with pytest.raises(TimeoutError, match=r"written 0 of 6 blocks.*only_if_new=False"):
        dense.initialize(arrays(6), timeout_s=0.2)
    assert dense.initialize(arrays(6), only_if_new=False)
    assert not dense.initialize(arrays(7))
    same(dense.pull(), arrays(6))


def test_wrong_arrays_are_named_and_nothing_is_applied(client: ParameterClient) -> None:
    dense = DenseParameters(client, "dense.wrong", SHAPES, block=16)
    dense.initialize(arrays(8))
    good = arrays(9)
    for wrong, message in (
        ({k: v for k, v in good.items() if k != "b"}, "lacks 'b'"),
        (good | {"a.biass": good["b"]}, "has 'a.biass' besides; did you mean 'a.bias'"),
        (good | {"b": good["b"][:39]}, r"'b' has shape \[39\]; expected \[40\]"),
        (good | {"b": np.ones(40, np.int64)}, "'b' is of int64; expected floats"),
        (good | {"b": np.full(40, np.inf)}, "not finite|must be finite|finite"),
    ):
        with pytest.raises(TableError, match=message):
            dense.push(wrong)
    same(dense.pull(), arrays(8))
    for shapes, message in (
        ({}, "there are none"),
        ({"steps": torch.zeros(3, dtype=torch.int64)}, "'steps' is of int64; expected floats"),
        ({"w": "3x4"}, "'w' is '3x4'; expected a shape"),
    ):
        with pytest.raises(TableError, match=message):
            DenseParameters(client, "dense.none", shapes)


def test_a_killed_shard_brings_them_back_and_a_checkpoint_too(
    client: ParameterClient, tmp_path: Path
) -> None:
    with (
        LocalShards(2, data=tmp_path / "data") as two,
        ParameterClient(two.addresses) as other,
    ):
        dense = DenseParameters(other, "dense.kept", SHAPES, block=8, durability="log")
        dense.initialize(arrays(10))
        dense.push(arrays(11))
        values = dense.pull()
        os.kill(two.processes[0].pid, signal.SIGKILL)
        two.restart(0)
        same(dense.pull(), values)
        other.save(tmp_path / "ck")
    client.load(tmp_path / "ck")  # three shards
    dense = DenseParameters(client, "dense.kept", SHAPES, block=8, durability="log")
    assert not dense.initialize(arrays(13))
    same(dense.pull(), values)


def test_a_module_trains_on_the_servers(client: ParameterClient) -> None:
    def build(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        )

    alone, there, other = build(0), build(0), build(1)
    alone[0].bias.requires_grad_(False)
    there[0].bias.requires_grad_(False)
    other[0].bias.requires_grad_(False)
    remote = DensePushPull(client, "dense.module", there, optimizer="adam", learning_rate=0.01)
    second = DensePushPull(client, "dense.module", other, optimizer="adam", learning_rate=0.01)
    assert torch.equal(other[2].weight, alone[2].weight), "the first one's values are everybody's"
    trainable = [p for p in alone.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=0.01)
    draw = torch.Generator().manual_seed(2)
    for _ in range(4):
        x, y = torch.randn(16, 6, generator=draw), torch.randn(16, 1, generator=draw)
        optimizer.zero_grad()
        ((alone(x) - y) ** 2).mean().backward()
        optimizer.step()
        ((there(x) - y) ** 2).mean().backward()
        remote.push()
        assert there[0].weight.grad is None
        remote.pull()
    second.pull()
    for mine, theirs, others in zip(
        alone.parameters(), there.parameters(), other.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        if mine.requires_grad:
            assert torch.equal(theirs, others)
