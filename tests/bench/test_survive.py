"""The benchmark of kills: what it takes for success, and how long a job stood still."""

import argparse
import json
import random
from dataclasses import replace

import pytest

from bench.survive import rivals
from bench.survive.figures import (
    Run,
    caught_up,
    figures,
    gaps_of,
    holds,
    longest_gap,
    lost_steps,
    runs_of,
)
from bench.survive.job import Shape, firsts_begun
from bench.survive.kills import KINDS, RARE, USUAL, Kill, drawn
from bench.survive.stall import lost_s

WELL = Run(state="succeeded", digest="a", each_trained_once=True, seconds=2.0)


@pytest.mark.parametrize(
    "other",
    [
        replace(WELL, digest="b"),
        replace(WELL, each_trained_once=False),
        Run(state="failed"),
    ],
)
def test_one_run_that_is_otherwise_and_nothing_holds(other):
    assert holds([WELL, WELL])
    assert not holds([WELL, WELL, other])
    assert not holds([other, WELL])


def test_a_job_stands_still_from_the_last_thing_before_a_kill_to_the_first_after_it():
    begun = [0.0, 1.0, 1.1, 4.0, 4.1, 30.0, 31.0]
    assert longest_gap(begun, 1.05, 2.0) == pytest.approx(2.9)
    assert longest_gap(begun, 1.05, 5.0) == pytest.approx(25.9)  # that is not over by then
    assert longest_gap(begun, 31.0, 5.0) == 0.0


def test_where_a_job_stands_still_is_told_of_the_kill_before():
    assert gaps_of([1.05, 4.05], [0.0, 1.0, 1.1, 4.0, 4.1, 5.0]) == pytest.approx([2.9, 0.9])
    assert gaps_of([], [0.0, 1.0]) == []


@pytest.mark.parametrize(
    ("at", "gaps"),
    [
        ((1.05, 2.0), (0.9, 2.0)),
        ((1.05, 2.0, 3.5), (0.9, 1.5, 0.5)),
        ((0.5, 2.0), (0.9, 2.0)),
        ((1.05, 12.0), (7.9, 8.0)),
    ],
)
def test_one_standstill_counts_once_however_many_are_killed_in_it(at, gaps):
    begun = [0.0, 0.5, 1.0, 1.1, 4.0, 4.1, 20.0, 20.1]
    if at[-1] < 10:
        begun = begun[:-2]
    assert gaps_of(at, begun) == pytest.approx(gaps)


def _killed(*at: tuple[str, float]) -> Run:
    return Run(
        "succeeded", "a", each_trained_once=True, kills=[Kill(kind, t, ["one"]) for kind, t in at]
    )


def test_goodput_is_that_of_the_unfailed_run():
    killed = _killed(("worker", 1.5)).timed([0.0, 1.0, 4.0], [0.0])
    found = figures([[WELL, killed]], 4)
    assert (found["goodput"], found["lost_s_a_kill"]) == (0.5, 2.0)
    assert found["stood_still_s"]["worker"]["most"] == 3.0
    assert (found["kills"], found["equal"], found["holds"]) == (1, 1, True)


def test_what_was_dead_is_no_loss_of_the_living():
    """Of four workers one was dead for 2 of 12 s: all were there for 11.5 s, and 10 were needed."""
    killed = _killed(("worker", 4.0), ("shard", 8.0)).timed([0.0, 12.0], [0.0, 6.0])
    found = figures([[replace(WELL, seconds=10.0), killed]], 4)
    assert found["caught_up_s"]["most"] == 2.0
    assert found["goodput"] == pytest.approx(10 / 12)
    assert found["goodput_of_the_living"] == pytest.approx(10 / 11.5)


def test_each_part_is_compared_with_its_own_unfailed_run():
    killed = _killed(("worker", 1.5)).timed([0.0, 1.0, 4.0], [0.0, 2.0])
    parts = [[WELL, killed], [replace(WELL, seconds=8.0), replace(killed, seconds=8.0)]]
    found = figures(parts, 4)
    assert found["goodput"] == pytest.approx(10 / 12)
    assert (found["kills"], found["jobs_killed"], found["caught_up_s"]["count"]) == (2, 2, 2)
    again = figures(runs_of(json.loads(json.dumps(found["parts"]))), 4)
    assert again == found
    parts[1][0] = replace(parts[1][0], digest="b")
    assert not figures(parts, 4)["holds"]


def test_who_never_began_has_not_caught_up(tmp_path):
    for name, lines in {"front/1": "1.0 8\n9.0 8\n", "trace/2": "4.5 8\n", "trace/3": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(lines)
    firsts = firsts_begun(tmp_path)
    assert firsts == [1.0, 4.5]
    assert caught_up(firsts, 2.0) == 2.5
    assert caught_up(firsts, 4.6) is None  # one that went on is none that is new


def test_steps_are_lost_from_where_all_went_back_to():
    begun = [float(t) for t in range(10)]  # of two micro-batches a step
    assert lost_steps(begun, [(3.5, 1), (7.5, 1)], 2) == [1.0, 2.0]
    assert lost_steps(begun, [(4.5, 2), (9.5, 3)], 2) == [0.5, 1.5]


def test_a_rival_that_is_not_installed_is_marked(tmp_path, monkeypatch):
    absent = {"absent": (lambda workers: [], "no_such_module", "pip install 'it'")}
    monkeypatch.setattr(rivals, "RIVALS", absent)
    found = rivals.run_rivals(tmp_path, Shape(), argparse.Namespace())
    assert "no_such_module" in found["absent"]["not_run"]
    assert "pip install 'it'" in found["absent"]["not_run"]


def test_kills_are_drawn_by_the_seed():
    draws = [[drawn(random.Random(seed), list(KINDS)) for _ in range(3)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1]
    every = random.Random(3)
    assert {drawn(every, list(KINDS)) for _ in range(300)} == set(KINDS)
    assert {*RARE, *USUAL} == set(KINDS)


def test_a_checkpoint_costs_what_its_steps_take_longer_than_others():
    begun = [0.0, 1.0, 2.0, 4.0, 5.5, 6.5, 7.5, 9.5]
    # From the step that it begins in to the one in which it is complete, 2 - 1 and 1.5 - 1.
    assert lost_s([(2.5, 5.0)], begun) == pytest.approx([1.5])
    assert lost_s([(2.5, 5.0), (7.6, 99.0)], begun) == pytest.approx([1.5, 1.0])
