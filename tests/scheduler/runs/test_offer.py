"""What a job is offered of nodes whose units are several cores, and profiles put together."""

import pytest

from protos.decision_pb2 import Decision, Layer, LayerCost, Workload
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import NodeStatus
from scheduler.runs.constraints import Constrained
from scheduler.runs.offer import (
    Offer,
    OfferError,
    asked_of,
    given_workload,
    make_offer,
    merge,
    with_threads,
)
from scheduler.runs.options import Option, cheapest, compared, offers_of, routed


def _job(**threads: int) -> JobSpec:
    spec = JobSpec(name="j")
    for name, number in threads.items():
        spec.schedule.offered.types.add(name=name, price_per_hour=1.0, limit=8, threads=number)
    return spec


def _node(name: str, kind: str, units: int, **other: object) -> NodeStatus:
    return NodeStatus(node_id=name, type=kind, units=units, address=f"h:{len(name)}", **other)  # type: ignore[arg-type]


def test_a_node_that_declares_more_units_than_its_cores_hold_offers_none() -> None:
    job = _job(cpu=0, cpu4=4)
    cores = [_node("a", "cpu", 8, cores=8)]
    fits = make_offer(job, [*cores, _node("b", "cpu4", 2, cores=8)])
    assert [kind.name for kind in fits.resources.types] == ["cpu", "cpu4"]
    assert not fits.note
    # As a node does that is not told how many: one for each core.
    crowded = make_offer(job, [*cores, _node("b", "cpu4", 8, cores=8)])
    assert [kind.name for kind in crowded.resources.types] == ["cpu"]
    assert crowded.missing == ("cpu4",)
    said = "threads: 4, and node b declares 8 such units on 8 cores; expected --units 2 or fewer"
    assert said in crowded.note
    small = make_offer(job, [*cores, _node("b", "cpu4", 1, cores=2)])
    assert "threads: 4, and node b has 2 cores" in small.note
    with pytest.raises(OfferError, match=r"schedule.resources: .*cpu4 \(threads: 4, and node b"):
        make_offer(_job(cpu4=4), [_node("b", "cpu4", 8, cores=8)])


def test_nodes_may_declare_more_units_of_one_core_than_they_have_and_emulated_ones_any() -> None:
    found = make_offer(_job(cpu=1), [_node("a", "cpu", 8, cores=2)])
    assert found.resources.types[0].limit == 8
    emulated = make_offer(_job(cpu4=4), [_node("a", "cpu4", 1, cores=2, emulated=True)])
    assert emulated.resources.types[0].limit == 1


def test_servers_on_a_type_that_does_not_fit_are_refused_and_not_waited_for() -> None:
    job = _job(cpu=0, cpu4=4)
    cost = {"cpu": LayerCost(compute_s=1.0)}
    job.schedule.given.CopyFrom(Workload(name="w", ps_type="cpu4", layers=[Layer(cost=cost)]))
    nodes = [_node("a", "cpu", 8, cores=8), _node("b", "cpu4", 8, cores=8)]
    with pytest.raises(OfferError, match="ps_type: 'cpu4' is not offered") as caught:
        given_workload(job, make_offer(job, nodes))
    assert type(caught.value) is OfferError


def _measured(kind: str, size: int, overhead: float = 0.0, **threads: int) -> Workload:
    cost = LayerCost(compute_s=size * 1e-3, sync_s=size * 2e-3, transfer_s=size * 3e-3)
    cost.delay_s, cost.memory_bytes = size * 4e-3, 1000 + 10 * size
    layer = Layer(name="l", cost={kind: cost}, activation_bytes=10)
    shape = {"batch": 64, "reference_batch": size, "overhead": overhead, "threads": threads}
    return Workload(name="w", layers=[layer], **shape)


@pytest.mark.parametrize(("one", "two"), [(16, 32), (32, 16), (16, 16)])
def test_profiles_of_other_micro_batches_are_of_one_size_together(one: int, two: int) -> None:
    parts = [("cpu", _measured("cpu", one, 0.1)), ("cpu2", _measured("cpu2", two, 0.3, cpu2=2))]
    found = merge(parts)
    size = max(one, two)
    assert found.reference_batch == size
    assert found.overhead == pytest.approx(0.3)
    assert dict(found.threads) == {"cpu2": 2}
    assert set(found.layers[0].cost) == {"cpu", "cpu2"}
    for cost in found.layers[0].cost.values():  # of what takes as long a sample
        assert cost.compute_s == pytest.approx(size * 1e-3)
        assert cost.sync_s == pytest.approx(size * 2e-3)
        assert cost.transfer_s == pytest.approx(size * 3e-3)
        assert cost.delay_s == pytest.approx(size * 4e-3)
        assert cost.memory_bytes == pytest.approx(1000 + 10 * size)
    assert parts[1][1].reference_batch == two  # what was given is as it was


def test_profiles_of_other_models_or_steps_do_not_go_together() -> None:
    other = _measured("cpu2", 16)
    other.batch = 32
    with pytest.raises(OfferError, match="measured another model"):
        merge([("cpu", _measured("cpu", 16)), ("cpu2", other)])
    other = _measured("cpu2", 16)
    other.layers[0].name = "m"
    with pytest.raises(OfferError, match="measured another model"):
        merge([("cpu", _measured("cpu", 16)), ("cpu2", other)])


def test_who_measures_is_not_asked_to_estimate_what_others_measure() -> None:
    offered = _job(cpu=0, gpu=0, absent=0).schedule.offered
    both = {"cpu", "gpu"}
    assert [one.name for one in asked_of(offered, "cpu", both).types] == ["cpu", "absent"]
    assert [one.name for one in asked_of(offered, "gpu", both).types] == ["gpu", "absent"]
    assert asked_of(offered, "cpu", {"cpu"}) == offered


def _open(*numbers: int, limit: int = 0) -> JobSpec:
    spec = _job(cpu=0)
    spec.schedule.offered.types[0].threads_any.extend(numbers)
    spec.schedule.offered.types[0].limit = limit
    return spec


def _told(offer: Offer) -> tuple[int, int, float, int]:
    (kind,) = offer.resources.types
    assert not kind.threads_any
    assert kind.threads == kind.node_units
    return kind.threads or 1, kind.limit, kind.price_per_hour, kind.units_per_host


def test_there_is_an_offer_for_each_number_of_threads() -> None:
    nodes = [_node("a", "cpu", 7, cores=8), _node("bb", "cpu", 4, cores=4)]
    found = offers_of(_open(1, 2, 4), nodes)
    assert [_told(one) for one in found] == [(1, 11, 1.0, 0), (2, 5, 2.0, 0), (4, 2, 4.0, 0)]
    nodes[1].address = "i:2"
    limited = offers_of(_open(4, 1, limit=6), nodes)
    assert [_told(one) for one in limited] == [(4, 1, 4.0, 1), (1, 6, 1.0, 7)]


def test_numbers_that_no_node_or_some_processor_does_not_hold_are_left_out() -> None:
    nodes = [_node("a", "cpu", 3, cores=8), _node("bb", "cpu", 2, cores=8)]
    assert [_told(one)[0] for one in offers_of(_open(1, 3, 4), nodes)] == [1, 3]
    nodes = [_node("a", "cpu", 8, cores=8), _node("bb", "cpu", 4, cores=2)]
    assert [_told(one)[0] for one in offers_of(_open(4, 2, 1), nodes)] == [2, 1]
    with pytest.raises(OfferError, match=r"cpu \(4 threads, and node bb has 2 cores"):
        offers_of(_open(4), nodes)
    assert [_told(one)[0] for one in offers_of(_open(2, 8, limit=4), nodes)] == [2]
    with pytest.raises(OfferError, match="8 threads, and the limit is 4 cores"):
        offers_of(_open(8, limit=4), nodes[:1])


def test_one_number_is_offered_where_units_are_counted_or_costs_are_given() -> None:
    nodes = [_node("a", "cpu", 8, cores=8)]
    job = _open(1, 2)
    job.schedule.elastic.max = 2
    assert [_told(one)[0] for one in offers_of(job, nodes)] == [1]
    job = _open(1, 2)
    job.schedule.given.CopyFrom(Workload(name="w", layers=[Layer(name="l")]))
    assert [_told(one)[0] for one in offers_of(job, nodes)] == [1]
    job.schedule.given.threads["cpu"] = 2
    assert [_told(one)[0] for one in offers_of(job, nodes)] == [2]
    job.schedule.given.threads["cpu"] = 4
    with pytest.raises(
        OfferError, match=r"of a worker with 4; expected 1 or 2, as schedule\.resources"
    ):
        offers_of(job, nodes)
    emulated = [_node("a", "cpu", 8, cores=8, emulated=True)]
    assert [_told(one)[0] for one in offers_of(_open(1, 2), emulated)] == [1]


def test_costs_of_other_threads_take_the_place_of_those_before() -> None:
    base = merge([("cpu", _measured("cpu", 16, 0.1)), ("gpu", _measured("gpu", 16))])
    size = {"rows": 4, "inputs": 2, "outputs": 2}
    base.linear.add(type="cpu", threads=1, forward="onednn", **size)
    base.linear.add(type="gpu", threads=1, forward="torch", **size)
    two = _measured("cpu", 32, 0.2, cpu=2)
    two.layers[0].cost["cpu"].compute_s = 7.0
    two.layers[0].cost["gpu"].compute_s = 99.0  # an estimate, where that was measured
    two.linear.add(type="cpu", threads=2, forward="torch", **size)
    found = with_threads(base, "cpu", two)
    costs = found.layers[0].cost
    assert costs["cpu"].compute_s == pytest.approx(7.0)
    assert costs["gpu"].compute_s == pytest.approx(32e-3)
    assert (found.reference_batch, found.overhead, dict(found.threads)) == (32, 0.2, {"cpu": 2})
    assert sorted((one.type, one.threads) for one in found.linear) == [("cpu", 2), ("gpu", 1)]
    assert with_threads(found, "cpu", _measured("cpu", 16)).threads == {}
    # What steps take besides is of the threads that they are measured with.
    four = _measured("cpu", 16, 0.4, cpu=4)
    four.layers[0].cost["gpu"].estimated = True
    assert with_threads(four, "cpu", _measured("cpu", 16, 0.1)).overhead == pytest.approx(0.1)
    assert base.layers[0].cost["cpu"].compute_s == pytest.approx(16e-3)


def test_products_chosen_with_other_threads_are_chosen_anew() -> None:
    job = _open(1, 2)
    for kind, threads in (("cpu", 1), ("cpu", 2), ("cpu", 0), ("gpu", 1)):
        job.train.routes.add(type=kind, threads=threads)
    one, two = offers_of(job, [_node("a", "cpu", 8, cores=8)])
    kept = [(route.type, route.threads) for route in routed(job, one).train.routes]
    assert kept == [("cpu", 1), ("cpu", 0), ("gpu", 1)]
    kept = [(route.type, route.threads) for route in routed(job, two).train.routes]
    assert kept == [("cpu", 2), ("gpu", 1)]
    assert len(job.train.routes) == 4


def test_the_cheapest_number_is_chosen_and_the_others_are_told() -> None:
    offers = offers_of(_open(1, 2, 4), [_node("a", "cpu", 8, cores=8)])

    def option(
        number: int, feasible: bool, cost: float, throughput: float = 1.0, overhead: float = 0.0
    ) -> Option:
        decision = Decision(feasible=feasible, cost=cost, throughput=throughput)
        return Option(offers[number], Constrained(Workload(overhead=overhead)), decision)

    options = [option(0, True, 3.0), option(1, True, 2.0), option(2, False, 1.0)]
    best = cheapest(options)
    assert best is options[1]
    assert compared(best, options) == [
        "Each worker on cpu computes on 2 cores: $2.00; on 1 core: $3.00; on 4 cores: no plan "
        "meets the demands; with what steps take besides layers."
    ]
    assert compared(options[0], options[:1]) == []
    same = [option(0, True, 2.0), option(1, True, 2.0, 5.0)]
    assert cheapest(same) is same[1]
    none = [option(0, False, 1.0, 3.0), option(1, False, 9.0, 4.0)]
    assert cheapest(none) is none[1]  # the fastest
    # Layers in half the time, and as much besides them as before.
    besides = [option(0, True, 2.0, overhead=0.2), option(1, True, 1.8, overhead=1 / 3)]
    assert cheapest(besides) is besides[0]
    assert "on 1 core: $2.50; on 2 cores: $2.70; with" in compared(besides[0], besides)[0]
