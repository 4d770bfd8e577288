"""What a job file says of experts out of memory."""

from pathlib import Path

import pytest

from heterps.job import offload
from heterps.job.file import JobFileError, load_job
from heterps.job.rewrite import job_content
from workers.offload.slots.policy import POLICIES

KEY = "train.offload"


def test_policies_have_one_list() -> None:
    assert tuple(sorted(POLICIES)) == offload.POLICIES


def test_a_step_lacks_nothing_unless_the_file_says_so(job: Path) -> None:
    assert load_job(job).train.staleness == 1
    found = load_job(job, [f"{KEY}.memory=2GB", f"{KEY}.path=/data/experts"]).train
    assert (found.staleness, found.offload.memory) == (0, "2GB")
    content = job_content(load_job(job, [f"{KEY}={{memory: 2GB, readers: 4}}"]))
    assert content["train"]["offload"] == {"memory": "2GB", "readers": 4}


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        ([f"{KEY}.readers=2"], f"{KEY}.memory: got nothing, expected bytes for experts"),
        ([f"{KEY}.memory=2 apples"], f"{KEY}.memory: got '2 apples', expected bytes, or such as"),
        ([f"{KEY}.memory=2000"], 'expected text; in quotes it is: "2000"'),
        ([f"{KEY}.memory='0'"], f"{KEY}.memory: got '0', expected more than no bytes"),
        ([f"{KEY}.path=experts"], f"{KEY}.path: got 'experts', expected an absolute path"),
        ([f"{KEY}.policy=fifo"], f"{KEY}.policy: got 'fifo', expected one of clock, lfu"),
        ([f"{KEY}.readers=65"], f"{KEY}.readers: got 65, expected 1 to 64 threads"),
        ([f"{KEY}.mode=ring"], f"{KEY}.mode: unknown key"),
        ([f"{KEY}=2GB"], f"{KEY}: got '2GB', expected a mapping with keys of memory, path"),
        (["train.staleness=1"], "train.staleness: got 1, expected 0: with train.offload"),
        (["train.split_experts=true"], "train.split_experts: got true, expected false"),
        (["train.ema=0.9"], "train.ema: got 0.9, expected 0: averages of experts"),
        (["train.compile=[tower]"], "train.compile: got ['tower'], expected none"),
    ],
)
def test_what_it_says_is_checked(job: Path, assignments: list[str], expected: str) -> None:
    given = [] if any(one.startswith(KEY) for one in assignments) else [f"{KEY}.memory=2GB"]
    with pytest.raises(JobFileError) as caught:
        load_job(job, [*given, *assignments])
    assert expected in "\n".join(caught.value.problems)
