"""What a job file says of its model's tables."""

import re
from pathlib import Path

import pytest

from heterps import Admission, Eviction, Score, Segment
from heterps.job.file import JobFileError, load_job
from workers.embedding.spec import EmbeddingSpec, options_of

JOB = """
name: small
model: {entry: model.py:build}
data: {train: t.parquet, label: y, sparse: [a]}
schedule: {resources: resources.yaml}
"""
RESOURCES = "types: [{name: cpu, price_per_hour: 1, limit: 4, memory_bytes: 1e9}]\n"


@pytest.fixture
def write(tmp_path: Path):
    (tmp_path / "model.py").write_text("def build(): ...\n")
    (tmp_path / "resources.yaml").write_text(RESOURCES)

    def written(more: str) -> Path:
        (tmp_path / "job.yaml").write_text(JOB + more)
        return tmp_path / "job.yaml"

    return written


def test_tables_by_name(write):
    job = load_job(
        write("""
tables:
  deep:
    optimizer: adam
    betas: [0.5, 0.9]
    learning_rate: 0
    dtype: bfloat16
    memory_bytes: 1048576
    admission: {kind: count, threshold: 3}
    eviction: {max_rows: 1000, order: lru}
  wide: {clip_norm: 1.5}
servers: {wire: bfloat16}
"""),
        ["tables.wide.seed=7"],
    )
    deep, wide = job.tables["deep"], job.tables["wide"]
    assert (deep.optimizer, [*deep.betas], deep.dtype) == ("adam", [0.5, 0.9], "bfloat16")
    assert deep.HasField("learning_rate")
    assert deep.learning_rate == 0
    assert (deep.admission.kind, deep.admission.threshold) == ("count", 3)
    assert (deep.eviction.max_rows, deep.eviction.order) == (1000, "lru")
    assert (wide.clip_norm, wide.seed, job.servers.wire) == (1.5, 7, "bfloat16")
    assert not wide.HasField("optimizer")


def test_segments_scores_and_rules_by_steps(write):
    job = load_job(
        write("""
tables:
  deep:
    segments:
      - {dim: 1, optimizer: ftrl, l1: 0.5}
      - {dim: 16, optimizer: adam, betas: [0.5, 0.9], eps: 1.0e-6, lazy: 10}
    score: {non_click: 0.2, click: 2, decay: 0.9}
    clicks: clicked
    admission: {kind: score, threshold: 1}
    eviction: {ttl_steps: 500, min_score: 0.5, every_steps: 100}
    wire: bfloat16
"""),
        ["tables.deep.eviction.ttl_steps=700"],
    )
    options = options_of(job.tables["deep"])
    assert options == {
        "segments": (
            Segment(dim=1, optimizer="ftrl", hyperparameters={"l1": 0.5}),
            Segment(
                dim=16,
                optimizer="adam",
                hyperparameters={"beta1": 0.5, "beta2": 0.9, "epsilon": 1e-6},
                lazy=10,
            ),
        ),
        "score": Score(non_click=0.2, click=2, decay=0.9),
        "clicks": "clicked",
        "admission": Admission(kind="score", threshold=1),
        "eviction": Eviction(ttl_steps=700, min_score=0.5, every_steps=100),
        "wire": "bfloat16",
    }
    before = EmbeddingSpec("deep", 17, optimizer="adam", betas=(0.1, 0.2), clip_norm=1.0)
    assert before.changed(options) == EmbeddingSpec("deep", 17, **options)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ("deep: {learning_rat: 1}", "tables.deep.learning_rat: unknown key; did you mean"),
        ("deep: {dim: 4}", "tables.deep.dim: unknown key"),
        ("deep: {learning_rate: -1}", "learning_rate=-1.0; expected a finite number >= 0"),
        ("deep: {learning_rate: fast}", "tables.deep.learning_rate: got 'fast', expected a number"),
        ("deep: {optimizer: adma}", "unknown optimizer 'adma'"),
        ("deep: {optimizer: ftrl, betas: [0.5, 0.9]}", "does not belong to ftrl"),
        ("deep: {l1: 1, amsgrad: true}", "does not belong to"),
        ("deep: {betas: [0.5]}", "betas=(0.5,); expected two"),
        ("deep: {betas: [0.5, 1.5]}", "beta2=1.5; expected 0 <= beta2 < 1"),
        ("deep: {dtype: float8}", "unknown dtype 'float8'"),
        ("deep: {memory_bytes: 5}", "memory_bytes=5; expected 0 or at least"),
        ("deep: {admission: {kind: count}}", "admission: threshold missing"),
        ("deep: {admission: {kind: score, threshold: 1}}", "admission by score needs a score"),
        ("deep: {eviction: {order: lru}}", "eviction without a rule; expected max_rows"),
        ("deep: {eviction: {every_steps: 5}}", "eviction without a rule; expected max_rows"),
        ("deep: {eviction: {ttl_steps: 5}}", "eviction by ttl_steps=5 without every_steps"),
        ("deep: {eviction: {min_norm: 5}}", "eviction by min_norm=5.0 without every_steps"),
        ("deep: {eviction: {min_score: 5, every_steps: 1}}", "min_score=5.0 needs a score"),
        ("deep: {score: {decay: 2}}", "decay=2.0; expected 0 < decay <= 1"),
        ("deep: {clicks: y}", "clicks='y' without a score"),
        ("deep: {wire: float8}", "unknown wire 'float8'"),
        ("deep: {segments: [{lazy: 1}]}", "segments: dim missing"),
        ("deep: {segments: [{dim: 1, lr: 1}]}", "tables.deep.segments[0].lr: unknown key"),
        ("deep: {segments: [{dim: 1, betas: [1]}]}", "segments: betas=(1.0,); expected two"),
        ("deep: {segments: [{dim: 1, l1: 1}]}", "l1=1.0 does not belong to adagrad"),
        ("deep: {segments: [{dim: 1, lazy: 1}]}", "all segments are lazy"),
        ("deep: {segments: [{dim: 1}], seed: 3}", "seed=3 beside segments"),
        ("deep: {segments: 3}", "tables.deep.segments: got 3, expected a list"),
        ("deep: {segments: [3]}", "tables.deep.segments[0]: got 3, expected a mapping"),
        ("deep: {eviction: {ttl_s: 5}}", "tables.deep.eviction.ttl_s: unknown key"),
        ("deep: 5", "tables.deep: got 5, expected a mapping"),
        ("'de ep': {seed: 1}", "table name 'de ep'"),
    ],
)
def test_what_no_table_has_is_named(write, tables, said):
    with pytest.raises(JobFileError, match=re.escape(said)) as error:
        load_job(write(f"tables:\n  {tables}\n"))
    assert "job.yaml:7: " in str(error.value)


def test_a_wire_that_there_is_not(write):
    with pytest.raises(JobFileError, match=r"servers\.wire: got 'float8', expected one of float32"):
        load_job(write("servers: {wire: float8}\n"))
