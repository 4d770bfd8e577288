"""`heterps plan`: demands, questions beyond one plan, and files it writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from heterps.errors import INFEASIBLE, OK, USAGE
from scheduler import Decision

ROOT = Path(__file__).resolve().parents[3]
PLAN = ["plan", str(ROOT / "examples/plan/workload.yaml")]
PLAN += ["--resources", str(ROOT / "examples/plan/resources.yaml")]
EXACT = [*PLAN, "--method", "exact", "--min-throughput", "600000"]


def test_demands_reach_the_decision(run):
    demands = ["--finish-by", "20m", "--max-price", "30", "--exclude", "t4", "--json"]
    code, out, _ = run(*PLAN, "--method", "exact", *demands)
    decision = json.loads(out)
    assert code == OK
    assert decision["min_throughput"] == pytest.approx(1e9 / 1200)
    assert decision["max_price_per_hour"] == 30
    assert decision["excluded"] == ["t4"]
    assert "t4" not in decision["assignment"]


def test_pareto_is_shown(run):
    code, out, _ = run(*EXACT, "--pareto", "--json")
    points = json.loads(out)["pareto"]
    assert code == OK
    assert len(points) > 3
    assert run(*EXACT, "--pareto")[1].count("Cost against throughput") == 1


def test_what_if_compares(run):
    code, out, _ = run(*EXACT, "--what-if", "v100.price=1.5", "--what-if", "t4.limit=4")
    assert code == OK
    for word in ("before", "after", "cost", "v100"):
        assert word in out
    code, out, _ = run(*EXACT, "--what-if", "v100.price=1.5", "--json")
    value = json.loads(out)
    assert value["changes"] == {"v100.price": "1.5"}
    assert value["after"]["cost"] < value["before"]["cost"]


def test_what_if_nothing_is_possible_any_more(run):
    code, out, _ = run(*EXACT, "--what-if", "min-throughput=9e6")
    assert code == INFEASIBLE
    assert "no plan reaches 9,000,000 samples/s" in out


def test_what_would_make_a_plan_possible_is_shown(run):
    code, out, _ = run(*EXACT, "--max-price", "0.01")
    assert code == INFEASIBLE
    assert "The cheapest change with which a plan exists is a cap of $" in " ".join(out.split())


def test_a_decision_is_exported_with_its_inputs(run, tmp_path):
    path = tmp_path / "decision.json"
    code, out, _ = run(*EXACT, "--export", str(path), "--json")
    assert code == OK
    kept = Decision.load(path)
    assert kept.workload is not None
    assert kept.resources is not None
    assert kept.cost == json.loads(out)["cost"]
    run(*EXACT, "--what-if", "v100.price=1", "--export", str(path), "--json")
    changed = Decision.load(path).resources
    assert changed is not None
    assert changed.types[2].price_per_hour == 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-price", "0"], "max_price_per_hour: 0.0: expected dollars an hour"),
        (["--max-price", "nan"], "max_price_per_hour: nan"),
        (["--min-throughput", "inf"], "min_throughput: inf: expected samples/s"),
        (["--finish-by", "0"], "finish_by: '0': expected hours"),
        (["--finish-by", "soon"], "finish_by: 'soon': expected hours"),
        (["--exclude", "t5"], "exclude: 't5': expected a type on offer; did you mean 't4'?"),
        (["--what-if", "v100.price"], "expected KEY=VALUE"),
        (["--what-if", "v100.prise=1"], "v100.prise: unknown key; did you mean 'price'?"),
        (["--finetune", "-1"], "finetune: -1.0: expected a finite number"),
        (["--export", "/no/such/folder/d.json"], "/no/such/folder/d.json: cannot be written"),
    ],
)
def test_what_cannot_be_used_exits_with_2(run, arguments, said):
    code, _, err = run(*PLAN, "--method", "greedy", *arguments)
    assert code == USAGE
    assert said in err


def test_planning_needs_no_torch():
    script = (
        "import sys; from heterps.cli import main; code = main(sys.argv[1:]);"
        "heavy = ('torch', 'gymnasium', 'scipy', 'grpc');"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *EXACT, "--pareto", "--what-if", "t4.limit=4"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_simulate_shows_what_a_price_leaves_out(run):
    code, out, _ = run(*EXACT, "--simulate")
    assert code == OK
    assert "Simulated" in out
    assert "as it was priced" in out
    assert "and 1 of 9 t4 takes 2" in out
    code, out, _ = run(*EXACT, "--simulate", "--json")
    assert code == OK
    told = json.loads(out)["simulated"]
    assert [row["key"] for row in told["scenarios"]] == ["priced", "shards", "varied", "slow"]
    assert told["assumed"]
    assert told["interruptions"] is None


def test_simulate_of_no_plan_is_null(run):
    code, out, _ = run(
        *EXACT, "--pin", "experts=v100", "--max-price", "0.01", "--simulate", "--json"
    )
    assert code == INFEASIBLE
    assert "simulated" in json.loads(out)
