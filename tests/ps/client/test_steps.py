"""Steps that many workers make together, against float64 rows that step once a commit."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from protos.reason_pb2 import PARTS_MISSING
from ps import Admission, Eviction, LocalShards, ParameterClient, Score, Segment, ShardError
from ps.errors import NonFiniteError, TableError
from tests.ps.engine.test_optimizers import Reference

OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": "sgd", "learning_rate": 0.1, "weight_decay": 0.1},
    {"optimizer": "momentum", "learning_rate": 0.1, "momentum": 0.8, "weight_decay": 0.02},
    {"optimizer": "adagrad", "learning_rate": 0.1, "epsilon": 1e-6},
    {"optimizer": "rowwise_adagrad", "learning_rate": 0.1, "epsilon": 1e-6},
    {"optimizer": "adam", "learning_rate": 0.05, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6},
    {"optimizer": "adamw", "learning_rate": 0.05, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-6,
     "weight_decay": 0.1},
]  # fmt: skip
_number = iter(range(1 << 30))


def fresh(client: ParameterClient, *options: dict[str, Any], **more: Any) -> tuple[str, list[str]]:
    """A series and tables of its own, dims 1, 2, ...: the series' name, and theirs."""
    prefix = f"steps-{next(_number)}."
    tables = [f"{prefix}{i}" for i in range(len(options))]
    for dim, (table, given_options) in enumerate(zip(tables, options, strict=True), start=1):
        client.create_table(table, dim, initializer="uniform", scale=1.0, **given_options, **more)
    return f"{prefix}series", tables


@dataclass
class Twin:
    """The same tables in float64, each row stepped once a commit."""

    client: ParameterClient
    tables: list[str]
    references: dict[str, Reference] = field(default_factory=dict)
    seen: dict[str, set[int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, client: ParameterClient, tables: list[str], options: list[dict[str, Any]]
    ) -> "Twin":
        twin = cls(client, tables)
        for table, given_options in zip(tables, options, strict=True):
            twin.references[table] = Reference(given_options)
            twin.seen[table] = set()
        return twin

    def meet(self, table: str, keys: NDArray[np.uint64]) -> None:
        """Begin rows where the table does."""
        new = sorted(set(keys.tolist()) - self.seen[table])
        if new:
            self.references[table].add(new, self.client.pull(table, np.array(new, np.uint64)))
            self.seen[table] |= set(new)

    def commit(self, parts: list[dict[str, tuple[Any, Any]]], scale: float, rate: float) -> None:
        for table in self.tables:
            given_parts = [part[table] for part in parts if table in part]
            keys = [int(k) for keys, _ in given_parts for k in keys]
            if not keys:
                continue
            grads = np.concatenate([g.astype(np.float64) for _, g in given_parts])
            total: dict[int, NDArray[np.float64]] = {}
            for key, grad in zip(keys, grads, strict=True):
                total[key] = total.get(key, 0) + grad
            for key, grad in total.items():
                self.references[table]._step(self.references[table].rows[key], grad * scale, rate)

    def check(self) -> None:
        for table in self.tables:
            keys = sorted(self.seen[table])
            if keys:
                np.testing.assert_allclose(
                    self.client.pull(table, np.array(keys, np.uint64)),
                    self.references[table].weights(keys),
                    rtol=2e-4,
                    atol=2e-5,
                )


@settings(max_examples=12)
@given(data=st.data())
def test_steps_of_any_parts_are_the_references(shards: LocalShards, data: st.DataObject) -> None:
    """Parts staged in any order, some of them again; some steps dropped."""
    with ParameterClient(
        shards.addresses, shared_memory=data.draw(st.booleans()), timeout_s=20
    ) as client:
        _check_steps(client, data)


def _check_steps(client: ParameterClient, data: st.DataObject) -> None:
    options = data.draw(st.lists(st.sampled_from(OPTIMIZERS), min_size=1, max_size=3))
    series, tables = fresh(client, *options)
    twin = Twin.of(client, tables, options)
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 16)))
    slots = data.draw(st.integers(1, 4))
    for step in range(data.draw(st.integers(1, 5))):
        parts: list[dict[str, tuple[Any, Any]]] = []
        for _ in range(slots):
            part = {}
            for dim, table in enumerate(tables, start=1):
                count = int(rng.integers(0, 12))
                keys = rng.integers(0, 2 ** int(rng.choice([4, 62])), count).astype(np.uint64)
                if rng.random() < 0.9:
                    part[table] = (keys, rng.normal(size=(count, dim)).astype(np.float32))
                    twin.meet(table, keys)
            parts.append(part)
        order = data.draw(
            st.permutations([*range(slots), *range(data.draw(st.integers(0, slots)))])
        )
        staged = [client.stage_async(series, step, slot, parts[slot]) for slot in order]
        for future in staged:
            future.result(20)
        squares = 0.0
        for table in tables:
            total: dict[int, Any] = {}
            for part in parts:
                for key, grad in zip(*part.get(table, ((), ())), strict=True):
                    total[int(key)] = total.get(int(key), 0) + grad.astype(np.float64)
            squares += sum(float((g * g).sum()) for g in total.values())
        found = client.tally(series, step, slots)
        assert found.finite
        np.testing.assert_allclose(found.squared_norm, squares, rtol=1e-5, atol=1e-9)
        if data.draw(st.integers(0, 3)) == 0:
            client.discard_async(series, step).result(20)
            continue
        scale, rate = float(rng.choice([1.0, 0.25])), float(rng.choice([1.0, 0.5]))
        for _ in range(int(rng.integers(1, 3))):  # again: harmless
            client.commit_async(series, step, slots, scale=scale, rate=rate).result(20)
        client.stage_async(series, step, 0, parts[0]).result(20)  # over: not staged anew
        twin.commit(parts, scale, rate)
    twin.check()
    client.drop_tables(series.removesuffix("series"))


def test_a_commit_that_carries_its_part(client: ParameterClient) -> None:
    series, tables = fresh(client, *OPTIMIZERS)
    twin = Twin.of(client, tables, OPTIMIZERS)
    rng = np.random.default_rng(1)
    for step in range(4):
        part = {}
        for dim, table in enumerate(tables, start=1):
            keys = rng.integers(0, 200, 300).astype(np.uint64)
            part[table] = (keys, rng.normal(size=(300, dim)).astype(np.float32))
            twin.meet(table, keys)
        for _ in range(2):
            client.commit_async(series, step, 1, parts=part, rate=0.5).result(20)
        twin.commit([part], 1.0, 0.5)
    twin.check()
    bad = {tables[0]: (np.uint64([3]), np.float32([[np.nan]]))}
    with pytest.raises(NonFiniteError, match="key 3"):
        client.commit_async(series, 9, 1, parts=bad)
    twin.check()


def test_what_a_commit_refuses(client: ParameterClient) -> None:
    series, (table,) = fresh(client, OPTIMIZERS[0])
    keys = np.arange(50, dtype=np.uint64)
    before = client.pull(table, keys)
    part = {table: (keys, np.ones((50, 1), np.float32))}
    client.stage_async(series, 0, 0, part).result(20)
    client.stage_async(series, 0, 2, part).result(20)
    for call in (
        lambda: client.tally(series, 0, 3),
        lambda: client.commit_async(series, 0, 3).result(20),
    ):
        with pytest.raises(ShardError, match=r"lacks the parts of slots \[1\]") as raised:
            call()
        assert raised.value.reason == PARTS_MISSING
    with pytest.raises(ShardError, match=r"has slots \[2\]"):
        client.commit_async(series, 0, 1).result(20)
    with pytest.raises(ShardError, match="lacks"):
        client.commit_async(series, 1, 1).result(20)
    np.testing.assert_array_equal(client.pull(table, keys), before)
    client.discard_async(series, 0).result(20)
    client.discard_async(series, 0).result(20)
    with pytest.raises(ShardError, match="dropped"):
        client.commit_async(series, 0, 1, parts=part).result(20)
    np.testing.assert_array_equal(client.pull(table, keys), before)
    client.commit_async(series, 3, 1, parts=part).result(20)
    with pytest.raises(ShardError, match="committed"):
        client.discard_async(series, 3).result(20)
    with pytest.raises(ShardError, match="later one was committed"):
        client.commit_async(series, 2, 1, parts=part).result(20)


def test_gradients_that_are_not_finite_are_found_and_never_applied(client: ParameterClient) -> None:
    series, (one, two) = fresh(client, OPTIMIZERS[4], OPTIMIZERS[0])
    keys = np.arange(300, dtype=np.uint64)
    before = client.pull(one, keys), client.pull(two, keys)
    big = np.full((300, 1), 3e38, np.float32)
    good = (keys, np.ones((300, 2), np.float32))
    for step, bad in enumerate((np.nan, np.inf, -np.inf)):
        grads = np.ones((300, 1), np.float32)
        grads[217] = bad
        client.stage_async(series, step, 0, {one: (keys, grads), two: good}).result(20)
        assert not client.tally(series, step, 1).finite
        with pytest.raises(NonFiniteError, match="not finite"):
            client.commit_async(series, step, 1).result(20)
        client.discard_async(series, step).result(20)
    for slot in range(2):  # each finite, their sum is not
        client.stage_async(series, 5, slot, {one: (keys, big), two: good}).result(20)
    assert not client.tally(series, 5, 2).finite
    np.testing.assert_array_equal(client.pull(one, keys), before[0])
    np.testing.assert_array_equal(client.pull(two, keys), before[1])


def test_sums_do_not_depend_on_the_order_of_arrival(client: ParameterClient) -> None:
    """Float32 sums have an order: that of slots."""
    options = OPTIMIZERS[4]
    series, _ = fresh(client)
    rng = np.random.default_rng(5)
    keys = rng.permutation(4000).astype(np.uint64)
    grads = [rng.normal(size=(4000, 2)).astype(np.float32) * 10.0**s for s in range(4)]
    rows = []
    for name, order in (("a", [0, 1, 2, 3]), ("b", [3, 1, 0, 2])):
        client.create_table(f"{series}.{name}", 2, **options)
        for slot in order:
            parts = {f"{series}.{name}": (keys, grads[slot])}
            client.stage_async(f"{series}.{name}", 0, slot, parts).result(20)
        client.commit_async(f"{series}.{name}", 0, 4).result(20)
        rows.append(client.pull(f"{series}.{name}", keys))
    np.testing.assert_array_equal(*rows)


def test_a_step_counts_as_one_push_of_each_key(client: ParameterClient) -> None:
    """For admission and for eviction by steps, however many workers had the key."""
    name = f"steps-{next(_number)}."
    client.create_table(
        f"{name}a", 1, optimizer="sgd", admission=Admission(kind="count", threshold=3)
    )
    client.create_table(f"{name}t", 1, optimizer="sgd", eviction=Eviction(ttl_steps=2))
    keys = np.arange(100, dtype=np.uint64)
    part = {f"{name}{t}": (keys, np.ones((100, 1), np.float32)) for t in "at"}
    for step in range(1, 4):
        assert len(client.keys(f"{name}a")) == 0
        for slot in range(4):
            client.stage_async(f"{name}s", step, slot, part).result(20)
        client.commit_async(f"{name}s", step, 4).result(20)
    assert len(client.keys(f"{name}a")) == 100
    some = {f"{name}t": (keys[:10], np.ones((10, 1), np.float32))}
    client.commit_async(f"{name}s", 6, 1, parts=some).result(20)
    assert client.shrink(f"{name}t", step=6) == 90
    assert sorted(client.keys(f"{name}t").tolist()) == list(range(10))


def test_what_waits_is_bounded_and_ends_with_its_tables(shards: LocalShards) -> None:
    with ParameterClient(shards.addresses, timeout_s=20) as client:
        series, (table,) = fresh(client, OPTIMIZERS[0])
        part = {table: (np.arange(1000, dtype=np.uint64), np.ones((1000, 1), np.float32))}

        def waiting() -> int:
            return sum(s.staged_bytes for s in client.stats())

        before = waiting()
        for step in range(1, 65):
            client.stage_async(series, step, 0, part).result(20)
        full = waiting() - before
        with pytest.raises(ShardError, match="64 steps wait"):
            client.stage_async(series, 65, 0, part).result(20)
        client.stage_async(series, 64, 0, part).result(20)  # again
        assert waiting() - before == full
        client.commit_async(series, 41, 1).result(20)  # those before it are passed over
        assert waiting() - before == full * 23 // 64
        client.stage_async(series, 12, 0, part).result(20)
        assert waiting() - before == full * 23 // 64
        with pytest.raises(ShardError, match="later one was committed"):
            client.commit_async(series, 12, 1, parts=part).result(20)
        client.drop_tables(series.removesuffix("series"))
        assert waiting() == before


def test_ends_of_a_series_keep_their_order(client: ParameterClient) -> None:
    """Commits and drops that are begun without waiting are made one after the other."""
    options = {"optimizer": "momentum", "learning_rate": 0.1, "momentum": 0.5}
    series, tables = fresh(client, options)
    twin = Twin.of(client, tables, [options])
    rng = np.random.default_rng(3)
    waiting = []
    keys = np.arange(40, dtype=np.uint64)
    twin.meet(tables[0], keys)
    for step in range(12):
        part = {tables[0]: (keys, rng.normal(size=(40, 1)).astype(np.float32))}
        waiting.append(client.stage_async(series, step, 0, part))
        waiting[-1].result(20)
        if step % 3 == 2:
            waiting.append(client.discard_async(series, step))
        else:
            waiting.append(client.commit_async(series, step, 1))
            twin.commit([part], 1.0, 1.0)
    for future in waiting:
        future.result(20)
    twin.check()
    with pytest.raises(ShardError, match="lacks"):
        client.commit_async(series, 50, 1).result(20)  # nothing was staged
    twin.check()


@pytest.mark.parametrize(
    ("wire", "options"),
    [
        ("float16", {"optimizer": "adagrad"}),
        ("bfloat16", {"optimizer": "adam", "dtype": "bfloat16"}),
        ("float32", {"segments": [Segment(dim=1, optimizer="ftrl"), Segment(dim=2, lazy=1)]}),
    ],
    ids=["float16", "bfloat16", "segments"],
)
def test_a_part_does_what_a_push_does(
    shards: LocalShards, wire: str, options: dict[str, Any]
) -> None:
    keys = np.arange(500, dtype=np.uint64)
    grads = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)
    with ParameterClient(shards.addresses, wire=wire, timeout_s=20) as client:
        for name in ("pushed", "staged", "carried"):
            client.create_table(f"{wire}.{name}", 3, **options)
        client.push(f"{wire}.pushed", keys, grads)
        client.stage_async(f"{wire}.s", 0, 0, {f"{wire}.staged": (keys, grads)}).result(20)
        client.commit_async(f"{wire}.s", 0, 1).result(20)
        part = {f"{wire}.carried": (keys, grads)}
        client.commit_async(f"{wire}.s", 1, 1, parts=part).result(20)
        pushed = client.pull(f"{wire}.pushed", keys)
        for name in ("staged", "carried"):
            np.testing.assert_array_equal(client.pull(f"{wire}.{name}", keys), pushed)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_tables_of_one_part_travel_each_in_its_own_way(
    shards: LocalShards, shared_memory: bool
) -> None:
    """One message a shard, though widths and what is counted differ; pulls, too."""
    name = f"steps-{next(_number)}."
    wires = {"a": None, "b": "bfloat16", "c": "float16", "d": "float32"}
    options: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1.0, "initializer": "zeros"}
    score = Score(non_click=1.0, click=3.0)
    rng = np.random.default_rng(0)
    with ParameterClient(
        shards.addresses, timeout_s=20, wire="float16", shared_memory=shared_memory
    ) as client:
        sent: list[dict[str, NDArray[np.float32]]] = []
        given_parts = []
        for t, wire in wires.items():
            scored = {"score": score, "eviction": Eviction(min_score=9.0)} if t in "bc" else {}
            client.create_table(f"{name}{t}", 3, **options, **scored, wire=wire)
        for _ in range(2):
            part: dict[str, tuple[Any, ...]] = {}
            sent.append({})
            for t, wire in wires.items():
                keys = rng.permutation(1000)[:600].astype(np.uint64)
                grads = rng.normal(size=(600, 3)).astype(np.float32)
                usage = (np.stack([np.full(600, 5.0), np.full(600, 1.0)]),) if t in "bc" else ()
                part[f"{name}{t}"] = (keys, grads, *usage)
                sent[-1][t] = np.zeros((1000, 3), np.float32)
                sent[-1][t][keys] = rounded(grads, wire or "float16")
            given_parts.append(part)
        for slot, part in enumerate(given_parts):
            client.stage_async(f"{name}s", 0, slot, part).result(20)
        client.commit_async(f"{name}s", 0, 2, shrink=[f"{name}b"]).result(20)
        everything = np.arange(1000, dtype=np.uint64)
        found = client.pull_many({f"{name}{t}": everything for t in wires}, distinct=True)
        for t, wire in wires.items():
            expected = -(sent[0][t] + sent[1][t])
            if t == "b":  # of those that one part had alone the score is 7, of the others 14
                twice = (sent[0][t] != 0).any(1) & (sent[1][t] != 0).any(1)
                expected[~twice] = 0
                assert len(client.keys(f"{name}{t}", 2000)) == twice.sum()
            np.testing.assert_array_equal(found[f"{name}{t}"], rounded(expected, wire or "float16"))
            np.testing.assert_array_equal(
                client.pull(f"{name}{t}", everything), found[f"{name}{t}"]
            )
        with pytest.raises(TableError, match="unknown wire 'int8'"):
            client.create_table(f"{name}e", 3, wire="int8")


def rounded(values: NDArray[np.float32], wire: str) -> NDArray[np.float32]:
    kind = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[wire]
    return torch.from_numpy(values).to(kind).float().numpy()
