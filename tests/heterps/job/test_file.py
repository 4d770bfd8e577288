"""Job files: what is right is complete, what is wrong is named with its line."""

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import scheduler
from heterps.job.file import METHODS, JobFileError, load_job
from heterps.job.schema import dotted_keys
from protos.job_pb2 import JobSpec

HIDDEN = frozenset(
    (
        *("directory", "code_digest", "entry_digest", "train.resume", "train.routes"),
        *("schedule.offered", "schedule.given"),
    )
)
KEYS = sorted(dotted_keys(JobSpec.DESCRIPTOR, HIDDEN))
QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def problems(job: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(JobFileError) as caught:
        load_job(job, overrides)
    return caught.value.problems


def edited(job: Path, old: str, new: str) -> Path:
    text = job.read_text()
    assert old in text
    job.write_text(text.replace(old, new))
    return job


def test_what_is_sent_and_where_it_goes(job):
    assert load_job(job, ["output=null", "code=null"]).output == ""
    assert load_job(job, ["output=models", "code=.."]).code == ".."
    assert "the job file's folder or one above" in problems(job, "code=src")[0]
    assert "the scheduler keeps models" in problems(job, "output=s3://bucket/models")[0]
    assert load_job(job, ["data.path=s3://bucket/rows"]).data.path == "s3://bucket/rows"
    both = problems(job, "data.path=s3://bucket/rows", "data.prepare=model.py:build")
    assert "a URL has its files already" in both[0]


def test_a_good_file_is_completed(job):
    spec = load_job(job)
    assert (spec.train.batch_size, spec.train.epochs, spec.train.staleness) == (1024, 2, 1)
    assert (spec.train.loss, spec.train.optimizer.name) == ("bce_with_logits", "adam")
    assert spec.train.optimizer.learning_rate == pytest.approx(1e-3)
    assert (spec.schedule.method, spec.output, spec.data.path) == ("ppo", "", ".")
    assert spec.directory == str(job.parent)
    assert [kind.name for kind in spec.schedule.offered.types] == ["cpu", "t4"]
    assert spec.model.args["rate"] == pytest.approx(1e-3)
    assert list(spec.model.args["hidden"]) == [64, 32]


def test_an_explicit_zero_is_no_default(job):
    assert load_job(job, ["train.staleness=0"]).train.staleness == 0


def test_overrides_take_yaml(job):
    spec = load_job(
        job,
        ["train.optimizer.learning_rate=1e-4", "schedule.emulate=[t4]", "schedule.pin.tower=cpu"],
    )
    assert spec.train.optimizer.learning_rate == pytest.approx(1e-4)
    assert list(spec.schedule.emulate) == ["t4"]
    assert dict(spec.schedule.pin) == {"tower": "cpu"}
    assert load_job(job, {"train.epochs": 7, "name": "other"}).train.epochs == 7


def test_precision_and_the_split_of_experts(job):
    plain = load_job(job).train
    assert (plain.precision, plain.split_experts) == ("fp32", False)
    given = load_job(job, ["train.precision=bf16", "train.split_experts=true"]).train
    assert (given.precision, given.split_experts) == ("bf16", True)
    (wrong,) = problems(job, "train.precision=bf32")
    assert "train.precision: got 'bf32', expected one of fp32, bf16, fp16; did you mean" in wrong
    assert (
        "train.split_experts: got 2, expected true or false"
        in (problems(job, "train.split_experts=2")[0])
    )


def test_settings_of_optimizers_and_steps(job):
    plain = load_job(job).train
    assert (plain.batch_norm, plain.rows.schedule, plain.clip) == ("local", "constant", 0)
    spec = load_job(
        job,
        [
            "train.optimizer={name: adamw, betas: [0.8, 0.95], eps: 1e-6}",
            "train.clip=2.5",
            "train.drop_last=true",
            "train.batch_norm=sync",
            "train.rows={schedule: cosine, warmup_steps: 7}",
        ],
    ).train
    assert (list(spec.optimizer.betas), spec.optimizer.eps) == ([0.8, 0.95], 1e-6)
    assert (spec.clip, spec.drop_last, spec.batch_norm) == (2.5, True, "sync")
    assert (spec.rows.schedule, spec.rows.warmup_steps) == ("cosine", 7)
    sgd = load_job(job, ["train.optimizer={name: sgd, momentum: 0.9}"]).train.optimizer
    assert sgd.momentum == 0.9


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["train.optimizer.momentum=0.5"],
            "train.optimizer.momentum: got 0.5, expected no momentum with adam; it is a set",
        ),
        (
            ["train.optimizer={name: sgd, betas: [0.9, 0.99]}"],
            "train.optimizer.betas: got [0.9, 0.99], expected no betas with sgd; it is a",
        ),
        (
            ["train.optimizer={name: sgd, eps: 1e-8}"],
            "it is a setting of adam, adamw, adagrad",
        ),
        (["train.optimizer={name: sgd, momentum: 1}"], "got 1, expected a number below 1"),
        (["train.optimizer.betas=[0.9]"], "got [0.9], expected two numbers from 0 to below 1"),
        (["train.optimizer.betas=[0.9, 1.0]"], "expected two numbers from 0 to below 1"),
        (["train.optimizer.eps=0"], "train.optimizer.eps: got 0, expected a number above 0"),
        (["train.clip=-1"], "train.clip: got -1, expected a number of at least 0"),
        (["train.batch_norm=synch"], "did you mean sync?"),
        (["train.rows.schedule=cosin"], "did you mean cosine?"),
        (
            ["train.batch_norm=sync", "train.micro_batches=4"],
            "train.micro_batches: got 4, expected 1, or none: with batch_norm sync a step is one",
        ),
        (
            ["train.batch_size=16", "train.micro_batches=17"],
            "train.micro_batches: got 17, expected at most the samples of a step, train.batch_size",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(job, overrides, text):
    (problem,) = problems(job, *overrides)
    assert text in problem


def test_demands_are_read(job):
    spec = load_job(
        job,
        [
            "schedule.max_price_per_hour=2.5",
            "schedule.finish_by_hours=1.5",
            "schedule.exclude=[t4]",
        ],
    )
    schedule = spec.schedule
    assert (schedule.max_price_per_hour, schedule.finish_by_hours) == (2.5, 1.5)
    assert list(schedule.exclude) == ["t4"]
    plain = load_job(job).schedule
    assert (plain.max_price_per_hour, plain.finish_by_hours, list(plain.exclude)) == (0, 0, [])


def test_a_pin_to_an_excluded_type_is_refused(job):
    found = problems(job, "schedule.exclude=[t4]", "schedule.pin.tower=t4")
    assert "schedule.pin.tower: got 't4', expected a type that schedule.exclude does not name" in (
        "\n".join(found)
    )


def test_a_pin_of_a_layer_with_a_dot(job):
    assert dict(load_job(job, ["schedule.pin.towers.left=cpu"]).schedule.pin) == {
        "towers.left": "cpu"
    }
    (wrong,) = problems(job, "schedule.pin.towers.left=cqu")
    assert "schedule.pin.towers.left: got 'cqu', expected a type of" in wrong


def test_the_methods_are_the_schedulers():
    assert set(METHODS) <= set(scheduler.METHODS)


@given(key=st.sampled_from(KEYS), place=st.integers(0, 20), letter=st.sampled_from("xqz_"))
@example(key="data.label", place=5, letter="_")  # which another key begins with
@QUICK
def test_a_misspelt_key_is_answered_with_the_right_one(job, key, place, letter):
    path, _, name = key.rpartition(".")
    place = min(place, len(name))
    wrong = f"{path}.".lstrip(".") + name[:place] + letter + name[place:]
    found = [text for text in problems(job, f"{wrong}=1") if "unknown key" in text]
    if wrong.startswith(("model.args.", "schedule.pin.")):
        return
    assert len(found) == 1
    assert f"--set {wrong}=1: {wrong}: unknown key" in found[0]
    assert f"did you mean {key}?" in found[0]
    assert "valid keys" in found[0]


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    key=st.sampled_from(KEYS),
)
@QUICK
def test_no_value_breaks_the_reader(job, key, value):
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True).removesuffix("...\n")
    with contextlib.suppress(JobFileError):  # and nothing else
        load_job(job, [f"{key}={text}"])


@given(text=st.text(max_size=200))
@QUICK
def test_no_text_breaks_the_reader(job, text):
    other = job.with_name("other.yaml")
    other.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(JobFileError, match=r"other\.yaml"):
        load_job(other)


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("train.epochs=many", "got 'many', expected a whole number"),
        ("train.epochs=-1", "got -1, expected a whole number from 0"),
        ("train.epochs=0", "got 0, expected a number above 0"),
        ("train.epochs=1.5", "got 1.5, expected a whole number"),
        ("train.epochs=true", "got true, expected a whole number"),
        ("train.batch_size=5000000000", "expected a whole number from 0 to 4294967295"),
        ("train.optimizer=adam", "expected a mapping with keys of name, learning_rate"),
        ("train.optimizer.name=adma", "expected one of adam, adamw, sgd, adagrad"),
        ("train.optimizer.learning_rate=.nan", "expected a number"),
        ("data.sparse=user", "expected a list, such as [user]"),
        ("data.label=no", 'in quotes it is: "no"'),
        ("name=2024-01-01", 'in quotes it is: "2024-01-01"'),
        ("data.label=", "got nothing, expected text"),
        ("data.sparse=[a, a]", "'a' twice, expected each column once"),
        ("data.sparse=[clicked]", "the label 'clicked'"),
        ("train.loss=next_token", "or pairwise, or no data.label"),
        ("train.optimizer.schedule=cosin", "did you mean cosine?"),
        ("schedule.method=pppo", "did you mean ppo?"),
        ("schedule.emulate=[t5]", "expected a type of resources.yaml: cpu, t4"),
        ("schedule.pin.tower=gpu", "expected a type of resources.yaml: cpu, t4"),
        ("schedule.min_throughput=-5", "expected a number of at least 0"),
        ("servers.shards=1025", "servers.shards: got 1025, expected at most 1024"),
        ("schedule.max_price_per_hour=0", "got 0, expected a number above 0"),
        ("schedule.max_price_per_hour=.inf", "expected a number"),
        ("schedule.finish_by_hours=-1", "got -1, expected a number above 0"),
        ("schedule.finish_by_hours=2h", "got '2h', expected a number"),
        ("schedule.exclude=[t5]", "expected a type of resources.yaml: cpu, t4"),
        ("schedule.exclude=t4", "expected a list, such as [t4]"),
        ("model.entry=model.py", "expected FILE.py:NAME"),
        ("model.entry=modle.py:build", "did you mean model.py?"),
        ("model.entry=model.py:biuld", "did you mean model.py:build?"),
        ("model.args=[1]", "expected a mapping of argument names"),
        ("model.args={rate: .inf}", "model.args.rate: got inf"),
        ("model.args={big: 9007199254740993}", "in quotes it stays exact"),
        ("data.prepare=prepare.py:prepare", "expected a file; there is none"),
        ("schedule.resources=resources.yml", "did you mean resources.yaml?"),
        ("name.first=x", "name is 'clicks', it has no keys"),
        ("directory=/", "unknown key"),
        ("epochs=3", "did you mean train.epochs?"),
        ("no assignment", "expected KEY=VALUE"),
        ("train={a: [}", "not valid YAML"),
    ],
)
def test_a_wrong_value_is_named(job, assignment, expected):
    found = problems(job, assignment)
    assert expected in "\n".join(found)
    assert f"--set {assignment}" in "\n".join(found)


def test_errors_name_file_and_line_all_at_once(job):
    edited(job, "  epochs: 2\n", "  epocs: 2\n  batch_size: big\n  loss: mse\n  loss: mse\n")
    found = problems(job)
    assert f"{job}:11: train.epocs: unknown key; did you mean train.epochs?" in found[0]
    assert (
        found[1] == f"{job}:12: train.batch_size: got 'big', expected a whole number of at least 0"
    )
    assert found[2] == f"{job}:14: train.loss: given twice; the first is at {job}:13"


@pytest.mark.parametrize("key", ["name", "model.entry", "data.label", "schedule.resources"])
def test_a_missing_key_is_named(job, key):
    tree = yaml.safe_load(job.read_text())
    *path, name = key.split(".")
    inner = tree
    for part in path:
        inner = inner[part]
    del inner[name]
    job.write_text(yaml.safe_dump(tree))
    assert f"{job}: {key}: missing; expected" in "\n".join(problems(job))


def test_tags_that_run_code_are_refused(job):
    edited(job, "rate: 1e-3", "rate: !!python/object/apply:os.getcwd []")
    assert "python/object" in "\n".join(problems(job))


def test_aliases_and_merges_are_read(job):
    edited(job, "  epochs: 2\n", "  <<: &base {epochs: 5}\n")
    assert load_job(job).train.epochs == 5


def test_a_recursive_alias_is_refused(job):
    edited(job, "args: {hidden: [64, 32], rate: 1e-3}", "args: &a {hidden: *a}")
    assert "recursive" in "\n".join(problems(job))


def test_an_error_in_the_resources_names_their_file(job):
    path = job.with_name("resources.yaml")
    path.write_text(path.read_text().replace("limit: 4", "limit: -4"))
    text = "\n".join(problems(job))
    assert "schedule.resources" in text
    assert f"{path}: types[1].limit" in text


def test_many_problems_fit_one_screen(job):
    edited(job, "name: clicks\n", "name: clicks\n" + "".join(f"x{i}: 1\n" for i in range(40)))
    with pytest.raises(JobFileError, match="and 28 more problems") as caught:
        load_job(job)
    assert len(str(caught.value).splitlines()) == 13
