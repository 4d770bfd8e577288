"""Reading workloads and resources: what is accepted, and how the rest is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler import InputError, Resources, Workload, load_resources, load_workload
from scheduler.problem.workload import check_together
from tests.scheduler.instances import EXAMPLE, cost, resources, workload


def test_example_reads_and_survives_the_wire() -> None:
    work = load_workload(EXAMPLE / "workload.yaml")
    offer = load_resources(EXAMPLE / "resources.yaml")
    assert [kind.is_cpu for kind in offer.types] == [True, False, False]
    assert Workload.from_message(work.to_message()) == work
    assert Resources.from_message(offer.to_message()) == offer
    assert Workload.parse(work.to_json()) == work
    assert Resources.parse(offer.to_json()) == offer
    check_together(work, offer)


def test_json_and_yaml_agree(tmp_path: Path) -> None:
    work = workload({"cpu": cost(0.5)})
    (tmp_path / "w.json").write_text(json.dumps(work))
    (tmp_path / "w.yaml").write_text(json.dumps(work).replace("3600000.0", "36e5"))
    assert load_workload(tmp_path / "w.json") == load_workload(tmp_path / "w.yaml")


def test_what_is_said_of_steps_and_hosts_survives_and_what_is_not_said_is_not_written() -> None:
    plain = workload({"cpu": cost(0.5)}, {"cpu": cost(0.5)}, name="w")
    assert Workload.parse(plain).to_json().keys() == plain.keys()
    assert Workload.parse(plain).staleness is None
    layer = {"weight_bytes": 1.0, "optimizer_bytes": 2.0, "activation_bytes": 3.0, "uncut": True}
    plain["layers"][0] |= {**layer, "shares": "head.weight", "output_bytes": 4.0, "one_host": True}
    plain["layers"][0]["alone"] = layer["alone"] = True
    plain["layers"][0]["passing_s"] = layer["passing_s"] = 1e-6
    plain["layers"][0]["cost"]["cpu"]["forward_share"] = 0.4
    said = {"micro_batches": 4, "staleness": 0, "batch": 64, "overhead": 0.1, "data_bytes": 5.0}
    said["crossing_s"], said["handling_s"] = 0.002, 0.001
    full = Workload.parse(plain | said)
    assert full.to_json() == Workload.parse(full.to_json()).to_json()
    assert full.to_json().items() >= said.items()
    assert full.to_json()["layers"][0].items() >= layer.items()
    assert Workload.from_message(full.to_message()) == full
    offer = resources(cpu=(1.0, 4))
    offer["types"][0] |= {"units_per_host": 2, "host_bandwidth_bytes_s": 1e9}
    found = Resources.parse(offer)
    assert Resources.from_message(found.to_message()) == found
    assert found.to_json()["types"][0]["units_per_host"] == 2


def test_a_step_has_no_more_micro_batches_than_samples() -> None:
    plain = workload({"cpu": cost(0.5)}) | {"batch": 8, "micro_batches": 9}
    with pytest.raises(InputError, match="micro_batches: 9: expected at most the samples"):
        Workload.parse(plain)


def _with(path: str, value: Any) -> dict[str, Any]:
    """A good workload with one value changed, at a dotted path."""
    work: Any = workload({"cpu": cost(0.5), "v100": cost(0.1)}, name="w")
    *keys, last = path.split(".")
    at = work
    for key in keys:
        at = at[int(key)] if key.isdigit() else at[key]
    at[last] = value
    result: dict[str, Any] = work
    return result


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("layers.0.cost.cpu.compute_s", -1.0, "layers[0].cost.cpu.compute_s: -1.0: expected"),
        ("layers.0.cost.cpu.compute_s", float("nan"), "layers[0].cost.cpu.compute_s: nan"),
        ("layers.0.cost.cpu.sync_s", float("inf"), "layers[0].cost.cpu.sync_s: inf"),
        ("layers.0.cost.cpu.transfer_s", "fast", "layers[0].cost.cpu.transfer_s: 'fast'"),
        ("layers.0.cost.cpu.compute_s", True, "layers[0].cost.cpu.compute_s: True"),
        ("layers.0.cost.cpu.parallel_compute", 1.5, "1.5: expected a number from 0 to 1"),
        ("layers.0.cost.cpu.parallel_sync", -0.1, "-0.1: expected a number from 0 to 1"),
        ("layers.0.cost.cpu.memory_bytes", -5, "layers[0].cost.cpu.memory_bytes: -5"),
        ("layers.0.cost.cpu.compute_sec", 1, "unknown key; did you mean 'compute_s'?"),
        ("layers.0.cost", {}, "layers[0].cost: {}: expected a mapping"),
        ("layers", [], "layers: []: expected a list of at least one item"),
        ("reference_batch", 0, "reference_batch: 0: expected a whole number from 1"),
        ("reference_batch", 1.5, "reference_batch: 1.5"),
        ("samples", 0, "samples: 0: expected a finite number above 0"),
        ("ps_core_s", -1e-6, "ps_core_s: -1e-06"),
        ("sample", 5, "sample: unknown key; did you mean 'samples'?"),
        ("name", "", "name: '': expected text"),
        ("micro_batches", 1.5, "micro_batches: 1.5: expected a whole number from 0"),
        ("staleness", -1, "staleness: -1: expected a whole number from 0 to 1000"),
        ("overhead", 1, "overhead: 1: expected a number from 0 to below 1"),
        ("layers.0.uncut", True, "layers[0].uncut: True: expected false for the last layer"),
        ("layers.0.uncut", "yes", "layers[0].uncut: 'yes': expected true or false"),
        ("layers.0.weight_bytes", -1, "layers[0].weight_bytes: -1: expected a finite number"),
        ("layers.0.cost.cpu.forward_share", 2, "forward_share: 2: expected a number from 0 to 1"),
    ],
)
def test_bad_workload_is_refused_by_key_and_value(path: str, value: Any, says: str) -> None:
    with pytest.raises(InputError) as error:
        Workload.parse(_with(path, value), "w.yaml")
    assert str(error.value).startswith("w.yaml: ")
    assert says in str(error.value)


def test_missing_key_is_named() -> None:
    work = workload({"cpu": cost(0.5)})
    del work["layers"][0]["cost"]["cpu"]["sync_s"]
    with pytest.raises(InputError, match=r"layers\[0\].cost.cpu.sync_s: missing; expected"):
        Workload.parse(work)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"price_per_hour": -0.1}, "types[0].price_per_hour: -0.1"),
        ({"limit": 0}, "types[0].limit: 0: expected a whole number from 1"),
        ({"memory_bytes": -1}, "types[0].memory_bytes: -1"),
        ({"device": "gpu"}, "types[0].device: 'gpu': expected cpu or cuda"),
        ({"price": 1}, "types[0].price: unknown key; did you mean 'price_per_hour'?"),
        ({"threads": -1}, "types[0].threads: -1: expected a whole number from 0"),
        ({"threads": 1.5}, "types[0].threads: 1.5: expected a whole number"),
        ({"threads": 1 << 20}, "types[0].threads: 1048576: expected a whole number"),
        ({"threads": "two"}, "types[0].threads: 'two'"),
        ({"threads": 2, "device": "cuda"}, "types[0].threads: 2: expected 1 of a type that is no"),
    ],
)
def test_bad_resources_are_refused(change: dict[str, Any], says: str) -> None:
    offer = resources(cpu=(0.04, 8))
    offer["types"][0].update(change)
    with pytest.raises(InputError) as error:
        Resources.parse(offer, "r.yaml")
    assert says in str(error.value)


def test_repeated_names_are_refused(tmp_path: Path) -> None:
    work = workload({"cpu": cost(0.5)}, {"cpu": cost(0.5)})
    work["layers"][1]["name"] = "l0"
    with pytest.raises(InputError, match=r"layers\[1\].name: 'l0'"):
        Workload.parse(work)
    offer = resources(cpu=(0.04, 8))
    with pytest.raises(InputError, match=r"types\[1\].name: 'cpu'"):
        Resources.parse({"types": offer["types"] * 2})
    for name in ("r.yaml", "r.json"):
        (tmp_path / name).write_text('{"types": [], "types": []}')
        with pytest.raises(InputError, match=f"{name}.*'types' appears twice"):
            load_resources(tmp_path / name)


def test_types_must_be_on_offer() -> None:
    work = Workload.parse(workload({"v1000": cost(0.5)}), "w.yaml")
    offer = Resources.parse(resources(cpu=(0.04, 8), v100=(2.42, 4)), "r.yaml")
    with pytest.raises(InputError, match=r"w.yaml: layers\[0\].cost: 'v1000'.*did you mean 'v100'"):
        check_together(work, offer)
    work = Workload.parse(workload({"v100": cost(0.5)}, ps_type="cpus"), "w.yaml")
    with pytest.raises(InputError, match=r"w.yaml: ps_type: 'cpus'.*did you mean 'cpu'"):
        check_together(work, offer)


def test_costs_are_those_of_a_worker_with_the_threads_of_its_type() -> None:
    offer = resources(cpu=(0.04, 8), cpu4=(0.16, 2))
    work = workload({"cpu": cost(0.5), "cpu4": cost(0.2)})
    check_together(Workload.parse(work), Resources.parse(offer))
    offer["types"][1]["threads"] = 4
    with pytest.raises(
        InputError, match=r"w\.yaml: threads\.cpu4: the costs are of a worker with 1: expected 4"
    ):
        check_together(Workload.parse(work, "w.yaml"), Resources.parse(offer))
    of_four = Workload.parse(work | {"threads": {"cpu4": 4}})
    check_together(of_four, Resources.parse(offer))
    assert Workload.from_message(of_four.to_message()) == of_four
    assert of_four.to_json()["threads"] == {"cpu4": 4}
    assert "threads" not in Workload.parse(work).to_json()
    offer["types"][1]["threads"] = 2
    with pytest.raises(InputError, match=r"threads\.cpu4: the costs are of a worker with 4"):
        check_together(of_four, Resources.parse(offer))
    for wrong in ({"cpu4": 0}, {"cpu4": "4"}, [4], 4):
        with pytest.raises(InputError, match="threads"):
            Workload.parse(work | {"threads": wrong})


def test_a_workload_that_takes_no_time_is_refused() -> None:
    work = Workload.parse(workload({"cpu": cost(0.0)}))
    with pytest.raises(InputError, match=r"compute_s or sync_s above 0"):
        check_together(work, Resources.parse(resources(cpu=(0.04, 8))))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.yaml: cannot be read \(No such file"):
        load_workload(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("layers: [")
    with pytest.raises(InputError, match=r"bad.yaml: expected JSON or YAML"):
        load_workload(tmp_path / "bad.yaml")
    (tmp_path / "nan.json").write_text(json.dumps(_with("samples", float("nan"))))
    with pytest.raises(InputError, match=r"nan.json: samples: nan"):
        load_workload(tmp_path / "nan.json")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(InputError, match=r"expected a mapping with name"):
        load_workload(tmp_path / "list.yaml")
