"""What a replay says of a trace is what a run did, and what counting by hand says."""

import copy
import json
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from heterps import MoE, load, offload
from heterps.commands.experts import experts
from protos.job_pb2 import JobSpec
from ps.local.table import save_checkpoint
from tests.workers.offload.running.test_offload import Model
from workers.model.code.entry import job_model
from workers.model.objective.curve import LossCurve
from workers.model.saved.model import SavedModel
from workers.offload.choice.replay import BELADY, REPLAYED, best, replay
from workers.offload.choice.trace import Call, Trace, TracedLayer, TraceError, read_trace, record
from workers.offload.slots.policy import POLICIES, FadingLFU

_EXPERTS = 6


def trace_of(sets: list[set[int]], layers: int = 1) -> Trace:
    traced = tuple(TracedLayer(str(i), _EXPERTS, 4096) for i in range(layers))
    calls = [Call(i % layers, 1, tuple(sorted(one))) for i, one in enumerate(sets)]
    return Trace(traced, tuple(calls))


calls = st.lists(st.sets(st.integers(0, _EXPERTS - 1), min_size=1, max_size=3), max_size=14)


@given(sets=calls, slots=st.integers(3, 6), layers=st.integers(1, 3))
def test_belady_reads_the_least_that_can_be(sets: list[set[int]], slots: int, layers: int) -> None:
    needed = list(trace_of(sets, layers).keys())

    @cache
    def least(at: int, inside: frozenset[int]) -> int:
        """Misses from a call on, by trying every way to make room."""
        if at == len(needed):
            return 0
        want = frozenset(needed[at])
        missing = want - inside
        over = len(inside | want) - slots
        if over <= 0:
            return len(missing) + least(at + 1, inside | want)
        found = []

        def drop(kept: frozenset[int], open_to: list[int], more: int) -> None:
            if more == 0:
                found.append(least(at + 1, kept | want))
                return
            for i, key in enumerate(open_to):
                drop(kept - {key}, open_to[i + 1 :], more - 1)

        drop(inside, sorted(inside - want), over)
        return len(missing) + min(found)

    outcome = replay(trace_of(sets, layers), slots, BELADY)
    assert outcome.misses == least(0, frozenset())
    assert outcome.hits + outcome.misses == sum(map(len, sets))
    for policy in POLICIES:
        assert replay(trace_of(sets, layers), slots, policy).misses >= outcome.misses


@given(sets=calls, slots=st.integers(3, 6), policy=st.sampled_from(sorted(POLICIES)))
def test_policies_do_what_they_say(sets: list[set[int]], slots: int, policy: str) -> None:
    """Against lists and counts: for each victim all in memory are looked at."""
    order: list[int] = []  # in memory, that which has not been used for longest first
    ring: list[int] = []  # of the clock, the next to be passed first
    uses: dict[int, float] = {}
    touched: set[int] = set()
    misses = 0
    since = 0
    for one in sets:
        wanted = sorted(one)
        for key in [k for k in wanted if k in order] + [k for k in wanted if k not in order]:
            if key not in order:
                misses += 1
                if len(order) == slots:
                    open_to = [k for k in order if k not in one]
                    if policy == "lru":
                        victim = open_to[0]
                    elif policy == "clock":
                        while ring[0] in one or ring[0] in touched:
                            if ring[0] not in one:
                                touched.discard(ring[0])
                            ring.append(ring.pop(0))
                        victim = ring[0]
                    else:
                        victim = min(open_to, key=lambda k: (uses[k], order.index(k)))
                    order.remove(victim)
                    ring.remove(victim)
                    if policy == "lfu":
                        uses.pop(victim)
                ring.append(key)
                touched.discard(key)
            else:
                order.remove(key)
                touched.add(key)
            order.append(key)
            uses[key] = uses.get(key, 0) + 1
            since += 1
            if policy == "lfu-decay" and since >= 8 * len(uses):
                since = 0
                uses = {k: n / 2 for k, n in uses.items()}
    assert replay(trace_of(sets), slots, policy).misses == misses


@given(
    steps=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=60),
    period=st.integers(1, 5),
)
def test_uses_that_fade_are_those_that_are_multiplied(
    steps: list[tuple[int, bool]], period: int
) -> None:
    policy, uses, order, since = FadingLFU(period), dict[int, float](), list[int](), 0
    policy._MOST = 8.0  # type: ignore[misc]
    for key, gives_way in steps:
        if gives_way and order:
            victim = min(order, key=lambda k: (uses[k], order.index(k)))
            assert policy.victim(()) == victim
            policy.left(victim)
            order.remove(victim)
            continue
        policy.used(key)
        uses[key] = uses.get(key, 0.0) + 1
        order = [k for k in order if k != key] + [key]
        since += 1
        if since >= period * len(uses):
            since = 0
            uses = {k: n / 2 for k, n in uses.items()}


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("slots", [1, 4, 9, 17, 20])
@pytest.mark.filterwarnings("ignore:offload")
def test_a_replay_is_the_run_that_was_traced(tmp_path: Path, policy: str, slots: int) -> None:
    """Whatever the reads' order in time, and with fewer slots than a forward needs."""
    resident = Model(16, 16, 6, 2).eval()
    model = copy.deepcopy(resident)
    draw = torch.Generator().manual_seed(slots)
    path, extent = tmp_path / "trace", 4096
    with (
        torch.no_grad(),
        offload(
            model,
            slots * extent,
            path=tmp_path / "experts",
            mode="cache",
            policy=policy,
            trace=path,
        ) as handle,
        record(resident, tmp_path / "other"),
    ):
        for tokens in (1, 1, 5, 1, 0, 1, 9, 1, 1):
            x = torch.randn(tokens, 16, generator=draw)
            assert torch.equal(model(x), resident(x))
        stats, line = handle.stats, handle.line()
        assert handle.ahead == (2 if slots == 17 else 0)
        assert handle.slots == min(slots, handle.experts) - handle.ahead
    trace = read_trace(path)
    outcome = replay(trace, handle.slots, policy)
    assert (outcome.hits, outcome.misses) == (stats.hits, stats.misses)
    assert outcome.bytes_read == stats.bytes_read - stats.bytes_wasted
    assert (stats.ahead > 0) == (handle.ahead > 0)
    assert trace.tokens == stats.tokens == 20
    least = replay(trace, handle.slots, BELADY).hit_rate
    assert f"hit rate {stats.hit_rate:.1%} (Belady's {least:.1%})" in line
    assert read_trace(tmp_path / "other").calls == trace.calls


def test_forwards_that_follow_can_be_taken_as_one() -> None:
    trace = trace_of([{0}, {5}, {1}, {5}, {0}, {4}, {2}, {3}], layers=2)
    assert [(c.layer, c.tokens, c.experts) for c in trace.in_batches(2).calls] == [
        (0, 2, (0, 1)),
        (1, 2, (5,)),
        (0, 2, (0, 2)),
        (1, 2, (3, 4)),
    ]


def test_what_is_no_trace_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    layer = MoE(16, 4, 16)
    with record(layer, path):
        layer(torch.randn(3, 16))
    whole = path.read_text()
    path.write_text(whole + "0 1 2")
    assert len(read_trace(path).calls) == 1
    for damage, match in (
        ("x" + whole, "expected a trace"),
        (whole.replace('"experts"', '"xperts"'), ":2: expected layers"),
        (whole + "0 1 9\n", ":4: expected a layer"),
        (whole + "1 1 0\n", ":4: expected a layer"),
        (whole + "0 1 1 1\n", ":4: expected a layer"),
        (whole + "0 one 1\n", ":4: expected a layer"),
    ):
        path.write_text(damage)
        with pytest.raises(TraceError, match=match):
            read_trace(path)


def test_the_command_replays(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    layer = MoE(16, 8, 16, seed=1).eval()
    with torch.no_grad(), record(layer, path):
        for i in range(30):
            layer(torch.randn(1, 16, generator=torch.Generator().manual_seed(i)))
    trace = read_trace(path)
    assert best(trace, 3).misses == min(replay(trace, 3, one).misses for one in POLICIES)
    result = CliRunner().invoke(experts, ["replay", str(path), "--memory", "12KIB", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["policy"] for row in rows] == list(REPLAYED)
    for row in rows:
        assert row["misses"] == replay(trace, 3, row["policy"]).misses
    shown = CliRunner().invoke(experts, ["replay", str(path)])
    assert "belady" in shown.stdout
    assert "30 tokens" in shown.stdout


_JOB = """
from torch import nn
from heterps import MoE

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe, self.head = MoE(4, 6, 8, 2, seed=1), nn.Linear(4, 1)

    def forward(self, dense):
        return self.head(self.moe(dense)).squeeze(1)
"""


def test_the_command_traces_a_saved_model(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(_JOB)
    job = JobSpec(directory=str(tmp_path))
    job.model.entry, job.data.label = "model.py:Model", "y"
    job.data.dense.extend("abcd")
    saved = SavedModel(str(tmp_path / "out"))
    saved.write_stage(0, job_model(job).state_dict())
    save_checkpoint(saved.tables, [])
    saved.finish(job, 1, LossCurve([0.5]), {"job_id": "job1"})
    rows = torch.randn(23, 4)
    pq.write_table(
        pa.table({name: rows[:, i].numpy() for i, name in enumerate("abcd")}),
        tmp_path / "rows.parquet",
    )
    out = tmp_path / "experts.trace"
    arguments = [str(tmp_path / "out"), str(tmp_path / "rows.parquet"), "-o", str(out)]
    result = CliRunner().invoke(experts, ["trace", *arguments, "--batch", "2"])
    assert result.exit_code == 0, result.output
    model, expected = load(tmp_path / "out"), []
    with torch.no_grad():
        for part in rows.split(2):
            model(part)
            chosen = tuple(model.moe.load.nonzero()[:, 0].tolist())
            expected.append(Call(0, len(part), chosen))
    assert list(read_trace(out).calls) == expected
