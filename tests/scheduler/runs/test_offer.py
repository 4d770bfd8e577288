"""What a job is offered of nodes whose units are several cores, and profiles put together."""

import pytest

from protos.decision_pb2 import Layer, LayerCost, Workload
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import NodeStatus
from scheduler.runs.offer import OfferError, asked_of, given_workload, make_offer, merge


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
