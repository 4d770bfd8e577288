"""A proposal is raised, kept and withdrawn without flip-flop, while a job runs."""

import threading
from dataclasses import replace

import pytest

from protos import scheduler_pb2 as pb
from scheduler import plan
from scheduler.replanning.measure import Filtered, Measurement
from scheduler.replanning.proposal import Proposal
from scheduler.replanning.recommendation import Recommendation
from scheduler.replanning.replan import propose
from scheduler.runs.changes.watch import Watch
from scheduler.state.store import Store, StoreError
from tests.scheduler.instances import cost, resources, workload

LAYERS = ({"cpu": cost(0.5)}, {"cpu": cost(20.0), "gpu": cost(0.1)})
DECISION = plan(
    workload(*LAYERS, samples=1e9), resources(cpu=(0.05, 200), gpu=(2.0, 8)), method="exact"
)
TOLD = Measurement(
    (Filtered(9, DECISION.stages[0].compute_s), Filtered(9, 10 * DECISION.stages[1].compute_s))
)
PAYS = propose(DECISION, TOLD)
WIDER = replace(PAYS.proposed.plan, stages=(replace(PAYS.proposed.stages[0], units=7),))
OTHER = replace(PAYS, proposed=replace(PAYS.proposed, plan=WIDER))
STAY = propose(DECISION, Measurement())


def almost(proposal: Proposal) -> Proposal:
    """It still pays, but less than the threshold."""
    return replace(proposal, worthwhile=False)


def no_more(proposal: Proposal) -> Proposal:
    return replace(proposal, worthwhile=False, savings=0.5 * proposal.moving_cost)


def after(*fresh: Proposal) -> Proposal | None:
    standing = Recommendation()
    for one in fresh:
        standing.consider(one)
    return standing.proposal


def test_the_fixtures_are_what_they_say() -> None:
    assert PAYS.worthwhile
    assert almost(PAYS).net_savings > 0 > no_more(PAYS).net_savings
    assert OTHER.target != PAYS.target
    assert not STAY.moves


def test_it_is_raised_when_seen_twice_in_a_row() -> None:
    assert after(PAYS) is None
    assert after(PAYS, STAY, PAYS) is None
    assert after(PAYS, OTHER) is None
    assert after(PAYS, PAYS) == PAYS


def test_what_pays_below_the_threshold_is_not_raised_but_kept() -> None:
    assert after(almost(PAYS), almost(PAYS), almost(PAYS)) is None
    assert after(PAYS, PAYS, *[almost(PAYS)] * 5) == almost(PAYS)


def test_it_is_withdrawn_when_it_no_longer_pays_twice_in_a_row() -> None:
    assert after(PAYS, PAYS, no_more(PAYS)) == PAYS
    assert after(PAYS, PAYS, no_more(PAYS), PAYS, no_more(PAYS)) == PAYS
    assert after(PAYS, PAYS, no_more(PAYS), no_more(PAYS)) is None
    assert after(PAYS, PAYS, STAY, STAY) is None


def test_two_plans_in_turn_do_not_flip() -> None:
    assert after(PAYS, PAYS, *[OTHER, PAYS] * 5) == PAYS
    assert after(PAYS, PAYS, *[OTHER, almost(PAYS)] * 5) == almost(PAYS)
    assert after(PAYS, PAYS, OTHER, OTHER) == OTHER
    assert after(PAYS, PAYS, *[almost(OTHER)] * 5) == PAYS


class Kept(Store):
    """A store that holds the records in a list."""

    def __init__(self) -> None:
        self.records: list[pb.Replan] = []
        self.twice = threading.Event()
        self.away = False

    def put_replan(self, job_id: str, record: pb.Replan) -> None:
        if self.away:
            raise StoreError("redis is away")
        self.records.append(record)
        if record.HasField("proposal"):
            self.twice.set()


def test_a_running_job_is_considered_and_its_proposal_kept() -> None:
    store = Kept()
    seen: list[int] = []

    def fresh(measurement: Measurement, samples: int) -> Proposal:
        seen.append(samples)
        return propose(DECISION, measurement, 1e9 - samples)

    with Watch("job", store, lambda: (TOLD, 1000), fresh, first_s=0.01):
        assert store.twice.wait(30.0)
    assert seen[:2] == [1000, 1000]
    last = store.records[-1]
    assert Measurement.from_message(last.measurement) == TOLD
    assert Proposal.from_message(last.proposal).worthwhile


def test_what_was_measured_is_kept_when_a_job_ends_early() -> None:
    store = Kept()
    with Watch("job", store, lambda: (TOLD, 0), lambda *_: None):
        pass
    assert [Measurement.from_message(one.measurement) for one in store.records] == [TOLD]


def test_nothing_is_kept_of_a_job_too_short_to_measure() -> None:
    store = Kept()
    with Watch("job", store, lambda: (Measurement(), 0), lambda *_: None):
        pass
    assert not store.records


@pytest.mark.parametrize("broken", ["fresh", "store"])
def test_a_failure_of_advice_is_none_of_the_job(broken: str) -> None:
    store = Kept()
    called = threading.Event()

    def fresh(measurement: Measurement, samples: int) -> Proposal | None:
        called.set()
        store.away = broken == "store"
        if broken == "fresh":
            raise RuntimeError("no advice")
        return PAYS

    with Watch("job", store, lambda: (TOLD, 0), fresh, first_s=0.01):
        assert called.wait(30.0)
