"""`heterps profile`: what it takes, what it writes, and that planning takes that."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from heterps import cli, report
from heterps.errors import INTERRUPTED, OK, USAGE
from heterps.job.resources import completed, load_resources
from heterps.report.layers import layer_table, sureness
from protos.decision_pb2 import LayerCost, Workload
from scheduler import load_workload
from scheduler.problem.fields import InputError
from tests.waiting import wait_until

MODEL = """
import torch
from torch import nn
from heterps import SparseEmbedding

class Net(nn.Module):
    def __init__(self, slots, dense=0, dim=4, width=16):
        super().__init__()
        self.rows = SparseEmbedding("rows", dim)
        self.tower = nn.Linear(slots * dim, width)
        self.head = nn.Linear(width, 1)

    def forward(self, sparse):
        return self.head(self.tower(self.rows(sparse).flatten(1))).squeeze(1)
"""


@pytest.fixture
def run(capfd):
    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["profile", *arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL)
    return f"{tmp_path / 'net.py'}:Net"


def test_a_bare_model_is_profiled_and_its_workload_planned(run, net, tmp_path, capfd):
    workload, resources = tmp_path / "w.yaml", tmp_path / "r.yaml"
    code, out, _ = run(
        *(net, "--args", "{slots: 3}", "--types", "v100,cpu", "--units", "1", "--batch", "64"),
        *("--samples", "1e6", "-o", str(workload), "--resources-output", str(resources)),
    )
    assert code == OK
    lines = [line.split() for line in out.splitlines()]
    assert ["rows", "v100"] in [line[:2] for line in lines]
    assert [line[-2] for line in lines if line[:1] == ["cpu"]] == ["measured"] * 3
    assert f"heterps plan {workload} --resources {resources}" in out
    made = load_workload(workload)
    assert (made.name, made.reference_batch, made.samples, made.ps_type) == ("net", 64, 1e6, "cpu")
    assert [layer.name for layer in made.layers] == ["rows", "tower", "head"]
    for layer in made.layers:
        assert {kind: cost.estimated for kind, cost in layer.cost.items()} == {
            "v100": True,
            "cpu": False,
        }
        assert all(cost.uncertainty > 0 for cost in layer.cost.values())
    assert load_resources(resources).types[0].price_per_hour == 2.48
    plan = ["plan", str(workload), "--resources", str(resources), "--method", "exact"]
    assert cli.main(plan) == OK
    assert "throughput" in capfd.readouterr().out


def test_a_model_that_cannot_be_traced_is_explained_in_a_line(run, tmp_path):
    (tmp_path / "bad.py").write_text("def build():\n    return 7\n")
    code, _, err = run(f"{tmp_path / 'bad.py'}:build", "--slots", "2", "--types", "cpu")
    assert code == USAGE
    said = "profiling failed: model.entry: bad.py:build returned int; expected a torch.nn.Module"
    assert said in err


def test_ctrl_c_ends_it_and_everything_it_started(net, tmp_path, interruptible):
    marker = f"profile-{os.getpid()}"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [*interruptible, "profile", net, "--args", "{slots: 3}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HETERPS_TEST_MARKER": marker, "TMPDIR": str(temporary)},
    )
    try:
        assert process.stdout is not None
        said = [process.stdout.readline()]
        while said[-1] and "rows/s" not in said[-1]:  # shards and workers are up from here on
            said.append(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
        assert process.returncode == INTERRUPTED, "".join(said) + rest
        assert "Traceback" not in "".join(said) + rest
        wait_until(lambda: not marked(marker), lambda: marked(marker), 10.0)
        assert not list(temporary.glob("heterps-*"))
    finally:
        process.kill()
        process.wait()


def marked(marker: str) -> list[str]:
    """Processes that inherited the marker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing argument 'MODEL'"),
        (("net.py:Net", "--types", "cpu", "--resources", "r.yaml"), "exclude each other"),
        (("job.yaml", "--slots", "3"), "--slots is for FILE.py:NAME"),
        (("job.yaml", "--args", "{}"), "--args is for FILE.py:NAME"),
        (("gone.py:Net", "--slots", "3"), "no such file"),
        (("job.yaml",), "cannot be read"),
    ],
)
def test_wrong_usage_exits_with_2(run, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*arguments)
    assert code == USAGE
    assert said in err


def test_what_a_bare_model_needs_is_asked_for(run, net):
    code, _, err = run(net)
    assert code == USAGE
    assert "--slots N" in err
    code, _, err = run(net, "--args", "[1]")
    assert code == USAGE
    assert "expected a mapping" in err
    code, _, err = run(net, "--slots", "3", "--types", "v1000")
    assert code == USAGE
    assert "did you mean 'v100'?" in err


def test_the_catalogue_shows_every_source(run):
    code, out, _ = run("--catalogue")
    assert code == OK
    assert all(name in out for name in ("cpu", "t4", "v100", "a10", "l4", "a100", "h100", "h200"))
    assert "https://arxiv.org/abs/2111.10635" in out
    assert "2026-" in out


def test_resources_take_from_the_catalogue_what_they_do_not_give(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "types:\n"
        "  - {catalogue: cpu, limit: 8, price_per_hour: 0.04}\n"
        "  - {name: volta, catalogue: v100, limit: 2}\n"
        "  - {name: own, limit: 1, price_per_hour: 1, memory_bytes: 1e9}\n"
    )
    cpu, volta, own = load_resources(path).types
    assert (cpu.name, cpu.device, cpu.price_per_hour, cpu.limit) == ("cpu", "cpu", 0.04, 8)
    assert (volta.name, volta.device, volta.price_per_hour) == ("volta", "cuda", 2.48)
    assert (volta.memory_bytes, volta.flops_per_s) == (1.6e10, 1.57e13)
    assert (own.flops_per_s, own.memory_bandwidth) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ({"catalogue": "v1000", "limit": 1}, "types[0].catalogue: 'v1000': expected an entry"),
        ({"catalogue": 7, "limit": 1}, "types[0].catalogue: 7: expected an entry"),
        ({"catalogue": "v100"}, "types[0].limit: missing"),
        ({"catalogue": "v100", "limit": 0}, "types[0].limit: 0: expected"),
        ({"catalogue": "v100", "limit": 1, "prize": 2}, "types[0].prize: unknown key"),
    ],
)
def test_wrong_resources_name_file_key_and_value(tmp_path, kind, said):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({"types": [kind]}))
    with pytest.raises(InputError) as raised:
        load_resources(path)
    assert str(raised.value).startswith(f"{path}: {said}")


@pytest.mark.parametrize("value", [None, 7, [], {}, {"types": "v100"}, {"types": ["v100"]}])
def test_what_is_no_resources_file_is_left_for_the_parser(value):
    assert completed(value) == value


def test_the_table_fits_80_columns_and_says_what_is_estimated(capfd):
    workload = Workload(reference_batch=64)
    layer = workload.layers.add(name="tower")
    layer.cost["cpu"].CopyFrom(
        LayerCost(
            compute_s=0.1234,
            sync_s=0.0123,
            transfer_s=1.234e-4,
            parallel_compute=1.0,
            parallel_sync=0.5,
            memory_bytes=123e6,
            uncertainty=0.05,
        )
    )
    layer.cost["v100"].CopyFrom(LayerCost(compute_s=1.5, estimated=True, uncertainty=0.693))
    report.show(report.console(), layer_table(workload, ["v100", "cpu"]))
    lines = capfd.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    expected = "tower v100 1.50 s 0% 0 B estimated ×÷2.0"
    assert lines[-2].split() == expected.split()
    expected = "cpu 123 ms 100% 12.3 ms 50% 123 µs 123 MB measured ±5%"
    assert lines[-1].split() == expected.split()


def test_a_large_spread_is_said_as_a_factor():
    assert [sureness(value) for value in (0.0, 0.004, 0.1, 0.5)] == ["", "±0%", "±10%", "×÷1.6"]
