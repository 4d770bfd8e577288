"""What workers would refuse is in the workload that is planned, and said."""

import pytest

from protos.decision_pb2 import (
    Decision,
    Layer,
    LayerCost,
    LinearRoute,
    PlanStage,
    ResourceType,
    Workload,
)
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import NodeStatus
from scheduler.runs.constraints import may_depend_on_model, of_job, of_model, shared_cores
from scheduler.runs.offer import OfferError, given_workload, make_offer

COST = LayerCost(compute_s=0.1, parallel_compute=1.0, parallel_sync=1.0, memory_bytes=1.0)


def workload(*names: str, kind: str = "dense", types: tuple[str, ...] = ("cpu",)) -> Workload:
    costs = dict.fromkeys(types, COST)
    layers = [Layer(name=name, kind=kind, cost=costs) for name in names]
    return Workload(name="w", reference_batch=100, samples=1e6, layers=layers)


def job(**train: object) -> JobSpec:
    spec = JobSpec(name="j")
    for name, value in {"batch_size": 64, "staleness": 1, **train}.items():
        setattr(spec.train, name, value)
    for name in ("cpu", "t4"):
        spec.schedule.offered.types.add(name=name, price_per_hour=1.0, limit=8, memory_bytes=1e9)
    return spec


def node(name: str, units: int, kind: str = "cpu", host: str = "h", **other: object) -> NodeStatus:
    return NodeStatus(node_id=name, type=kind, units=units, address=f"{host}:{len(name)}", **other)  # type: ignore[arg-type]


def test_a_job_says_batch_micro_batches_and_staleness() -> None:
    found = of_job(workload("a"), job(), []).workload
    assert (found.batch, found.micro_batches, found.staleness) == (64, 0, 1)
    told = of_job(workload("a"), job(micro_batches=100, staleness=0), [])
    assert (told.workload.micro_batches, told.workload.staleness) == (64, 0)
    assert told.notes == ("A step has 64 micro-batches: train.micro_batches says so.",)
    fresher = workload("a")
    fresher.staleness = 0
    assert of_job(fresher, job(), []).workload.staleness == 0
    together = of_job(workload("a"), job(split_experts=True, staleness=2), [])
    assert (together.workload.staleness, together.workload.lockstep) == (0, True)
    assert "a worker keeps what all of its micro-batches need" in together.notes[-1]
    assert not found.lockstep


def test_jobs_that_copy_their_state_are_known() -> None:
    kept, again, moved, grown = (job() for _ in range(4))
    kept.train.checkpoint.every = "5m"
    again.retries = 1
    moved.schedule.replan = "auto"
    grown.schedule.elastic.max = 4
    for one in (kept, again, moved, grown):
        assert of_job(workload("a"), one, []).workload.copied
    advised = job()
    advised.schedule.replan = "advise"
    assert not of_job(workload("a"), advised, []).workload.copied


def test_what_computes_linear_layers_stays_as_it_was_chosen_and_is_said() -> None:
    def route(kind: str, forward: str) -> LinearRoute:
        size = {"rows": 512, "inputs": 429, "outputs": 400, "threads": 1}
        return LinearRoute(
            type=kind, forward=forward, grad_input="torch", grad_weight="torch", **size
        )

    measured = workload("a")
    measured.linear.extend([route("cpu", "torch"), route("t4", "torch")])
    told = of_job(measured, job(linear="auto"), [])
    assert told.workload.linear == measured.linear
    assert told.notes == ("Products of nn.Linear are PyTorch's own: nothing else was 5 % faster.",)
    again = job(linear="auto")
    again.train.routes.append(route("cpu", "onednn"))
    told = of_job(measured, again, [])
    assert list(told.workload.linear) == [route("cpu", "onednn"), route("t4", "torch")]
    assert "on cpu by onednn, '429x400 (forward)'. That stays for all of the job" in told.notes[0]
    for plain in ("torch", ""):
        told = of_job(measured, job(linear=plain), [])
        assert not told.workload.linear
        assert not told.notes


def test_fp16_may_be_cut_into_stages() -> None:
    found = of_job(workload("a", "b", "c"), job(precision="fp16"), [])
    assert [layer.uncut for layer in found.workload.layers] == [False, False, False]


def test_experts_that_are_split_are_on_one_host_unless_all_nodes_let_them_cross() -> None:
    split, moe = job(split_experts=True), workload("x", kind="moe")
    crossing = [node("a", 2, plain_collectives=True), node("b", 2, host="i")]
    bound = of_job(moe, split, crossing)
    assert bound.workload.layers[0].one_host
    assert "with 'x' are on one host: train.split_experts" in bound.notes[0]
    crossing[1].plain_collectives = True
    assert not of_job(moe, split, crossing).workload.layers[0].one_host
    assert not of_job(moe, job(), []).workload.layers[0].one_host
    assert not of_job(workload("a"), split, []).workload.layers[0].one_host


def test_a_type_that_does_not_compute_in_bf16_is_not_offered_to_a_job_that_does() -> None:
    nodes = [node("a", 2), node("b", 1, "t4", without_bf16=True)]
    offer = make_offer(job(precision="bf16"), nodes)
    assert [kind.name for kind in offer.resources.types] == ["cpu"]
    assert offer.note == "not offered, because it does not compute in bf16: t4"
    both = workload("a", types=("cpu", "t4"))
    given = job(precision="bf16")
    given.schedule.given.CopyFrom(both)
    assert list(given_workload(given, offer).layers[0].cost) == ["cpu"]
    given.schedule.given.CopyFrom(workload("a", types=("t4",)))
    with pytest.raises(OfferError, match=r"layer 'a': no type that may run it is offered; .* bf16"):
        given_workload(given, offer)
    assert len(make_offer(job(), nodes).resources.types) == 2
    with pytest.raises(OfferError, match=r"train.precision: 'bf16', which t4 does not compute in"):
        make_offer(job(precision="bf16"), nodes[1:])


def test_what_the_model_says_is_taken_over() -> None:
    seen = Workload(layers=[Layer(name="a", uncut=True, shares="so"), Layer(name="b")])
    seen.micro_batches = 4
    found = of_model(workload("a", "b"), job(), [], seen)
    assert [(layer.uncut, layer.shares) for layer in found.workload.layers] == [
        (True, "so"),
        (False, ""),
    ]
    assert found.workload.micro_batches == 4
    assert "A step has 4 micro-batches, whatever the plan" in found.notes[0]
    said = workload("a", "b")
    said.micro_batches = 8  # which the model does not allow
    assert of_model(said, job(), [], seen).workload.micro_batches == 4
    seen.micro_batches = 0
    assert of_model(said, job(), [], seen).workload.micro_batches == 8
    with pytest.raises(OfferError, match=r"costs of the layers 'x'; expected .* 'a', 'b'"):
        of_model(workload("x"), job(), [], seen)


def test_only_a_plan_of_several_workers_may_depend_on_the_model() -> None:
    def planned(*units: int, feasible: bool = True) -> Decision:
        return Decision(feasible=feasible, stages=[PlanStage(units=one) for one in units])

    assert not may_depend_on_model(planned(1), job())
    assert may_depend_on_model(planned(2), job())
    assert may_depend_on_model(planned(1, 1), job())
    assert not may_depend_on_model(planned(1, 1, feasible=False), job())
    own = job()  # whose loss may be one of whole batches: all of a step is in memory
    own.model.loss = "losses.py:total"
    assert may_depend_on_model(planned(1), own)
    outside = job()  # whose experts may be on no GPU
    outside.train.offload.memory = "2GB"
    assert may_depend_on_model(planned(1), outside)


def test_a_loss_of_whole_batches_is_known_before_there_is_a_plan() -> None:
    told = "The loss is one of whole batches"
    alone = of_job(workload("a"), job(loss="contrastive"), [])
    heads = job()
    heads.train.heads["rank"].loss = "pairwise"
    heads.train.heads["click"].loss = "mse"
    for found in (alone, of_job(workload("a"), heads, [])):
        assert found.workload.whole_batch
        assert found.notes[-1].startswith(told)
    seen = Workload(layers=[Layer(name="a")], whole_batch=True)  # by a loss of the job's own
    plain = of_job(workload("a"), job(), [])
    assert not plain.workload.whole_batch
    found = of_model(plain.workload, job(), [], seen)
    assert found.workload.whole_batch
    assert found.notes[-1].startswith(told)
    assert of_model(found.workload, job(), [], seen).notes == found.notes


def test_units_beyond_the_cores_of_a_host_are_said() -> None:
    decision = Decision(stages=[PlanStage(type="cpu"), PlanStage(type="t4")])
    nodes = [node("a", 4, cores=4), node("b", 1, "t4", cores=4), node("c", 9, host="i", cores=16)]
    (said,) = shared_cores(decision, nodes)
    assert said.startswith("Host h declares 5 units on 4 cores:")
    assert shared_cores(Decision(stages=[PlanStage(type="cpu")]), nodes) == []
    assert shared_cores(decision, [node("g", 8, "t4")]) == []  # GPUs
    decision.resources.types.add(name="cpu", threads=4)
    (said,) = shared_cores(decision, [node("a", 2, cores=7)])
    assert said.startswith("Host h declares 2 units of 8 threads on 7 cores:")
    assert shared_cores(decision, [node("a", 2, cores=8)]) == []


def test_units_a_host_follow_from_the_nodes() -> None:
    here = [node("a", 3), node("bb", 2)]
    found = make_offer(job(), here).resources.types[0]
    assert (found.limit, found.units_per_host) == (5, 0)
    found = make_offer(job(), [*here, node("c", 4, host="i")]).resources.types[0]
    assert (found.limit, found.units_per_host) == (8, 5)
    assert isinstance(found, ResourceType)


def test_what_has_experts_the_model_says_where_given_costs_do_not() -> None:
    """Else workers would refuse the plan: experts that are split over hosts, or on a GPU."""
    seen = Workload(layers=[Layer(name="a", kind="moe"), Layer(name="b", kind="dense")])
    given = workload("a", "b", kind="", types=("cpu", "t4"))
    split = of_model(given, job(split_experts=True), [node("a", 2)], seen)
    assert [layer.one_host for layer in split.workload.layers] == [True, False]
    assert "with 'a' are on one host" in split.notes[0]
    outside = job()
    outside.schedule.offered.types[1].device = "cuda"
    outside.train.offload.memory = "2GB"
    found = of_model(given, outside, [], seen)
    assert [sorted(layer.cost) for layer in found.workload.layers] == [["cpu"], ["cpu", "t4"]]


def test_experts_out_of_memory_are_on_cores_alone() -> None:
    spec = job()
    spec.schedule.offered.types[1].device = "cuda"
    spec.train.offload.memory = "2GB"
    mixed = workload("a", kind="moe", types=("cpu", "t4"))
    mixed.layers.extend(workload("b", types=("cpu", "t4")).layers)
    found = of_job(mixed, spec, [])
    assert [sorted(layer.cost) for layer in found.workload.layers] == [["cpu"], ["cpu", "t4"]]
    assert found.workload.staleness == 0
    assert "'a' run on CPU cores: train.offload" in found.notes[0]
    spec.schedule.emulate.append("t4")  # which is a core here
    assert sorted(of_job(mixed, spec, []).workload.layers[0].cost) == ["cpu", "t4"]


def test_what_the_model_wants_one_worker_alone_for_has_a_stage_of_one() -> None:
    seen = Workload(layers=[Layer(name="a"), Layer(name="b", alone=True)])
    found = of_model(workload("a", "b"), job(), [], seen)
    assert [layer.alone for layer in found.workload.layers] == [False, True]
    assert "'b' changes a buffer in forward" in found.notes[-1]
    measured = workload("a", "b")
    for layer in measured.layers:
        layer.alone = True
    found = of_job(measured, job(), [])
    assert "'a', 'b' change a buffer in forward" in found.notes[-1]
    assert not any("buffer" in note for note in of_job(workload("a", "b"), job(), []).notes)
