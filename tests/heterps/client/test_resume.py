"""Going on from a job's checkpoint, by client and command line, to what is launched."""

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from heterps import Client, cli
from heterps.client import archive
from heterps.client.origins import OriginError, check_same
from heterps.commands import complete
from heterps.commands.own_cluster import look_up_weights
from heterps.errors import UnknownJobError
from heterps.job.file import load_job
from protos import scheduler_pb2 as pb
from tests.scheduler.lives import prepare
from tests.scheduler.stub_node import BATCH, Service, serving


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    prepare(tmp_path)
    with serving(tmp_path, monkeypatch) as made:
        yield made


def test_a_job_that_was_cancelled_is_gone_on_with(
    service: Service, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, at = service.node, ("--scheduler", service.address)
    service.submit(service.spec("job"))
    worker = node.worker("job", 1)
    cuts = [service.cut("job", step) for step in (10, 20)]
    for cut in cuts:
        Path(cut.place).mkdir(parents=True)
        Path(cut.place, "cut.json").write_text("{}")
    node.report(worker, cuts, step=25, samples=25 * BATCH)
    with Client(service.address) as client:
        with pytest.raises(OriginError, match="job: is running; expected one that has ended"):
            client.submit(None, resume="job")
        client.cancel("job")
        assert [cut.step for cut in client.checkpoints("job")] == [10, 20]

        code, out, _ = run("checkpoints", "job", *at, "--json")
        listed = json.loads(out)
        assert (code, [one["step"] for one in listed]) == (0, [10, 20])
        assert listed[1]["place"] == cuts[1].place
        code, out, _ = run("checkpoints", "job", *at)
        assert "heterps submit --resume job@20" in out

        monkeypatch.setenv("HETERPS_SCHEDULER", service.address)
        for typed, offered in (("job@", ["job@20", "job@10"]), ("job@1", ["job@10"])):
            found = complete.cuts(click.Context(cli.heterps), click.Option(["--resume"]), typed)
            assert [item.value for item in found] == offered

        code, out, err = run("submit", "--resume", "job@10", "--id", "more", *at)
        assert code == 0, err
        spec = client.status_message("more").job
        before = client.status_message("job").job
        assert (spec.train.resume.job_id, spec.train.resume.step) == ("job", 10)
        spec.train.ClearField("resume")
        assert spec == before, "all else is as it was"
        again = node.worker("more", 1)
        assert (again.resume, again.cuts) == (
            cuts[0].place,
            f"{service.directory}/output/more.cuts",
        )
        job = client.status("more")
        assert (job.from_step, job.step, job.samples) == (10, 10, 10 * BATCH)
        client.cancel("more")

        # Another plan may be given, and no other training.
        other = service.spec("other")
        other.model.CopyFrom(before.model)
        other.schedule.max_price_per_hour = 5.0
        job_id = client.submit(other, resume="job")
        assert node.worker(job_id, 1).resume == cuts[1].place
        client.cancel(job_id)
        other.train.offload.memory = "1GB"  # where experts lie is no part of the training
        check_same(other, before, "job")
        other.train.optimizer.learning_rate = 0.5
        with pytest.raises(
            OriginError, match=r"train\.optimizer\.learning_rate: got 0\.5, expected"
        ):
            client.submit(other, resume="job")
        other = service.spec("warm")
        other.train.warm_start = "job@10"
        job_id = client.submit(other, code=False)
        worker = node.worker(job_id, 1)
        assert (worker.job.train.warm_start, worker.resume) == (cuts[0].place, "")
        assert client.status(job_id).from_step == 0
        client.cancel(job_id)

    code, _, err = run("submit", *at)
    assert code == 2
    assert "Missing argument 'JOB.yaml'" in err
    code, _, err = run("submit", "--resume", "job@15", *at)
    assert code == 2
    assert "has no checkpoint of step 15; expected one of 10, 20" in err


def test_a_job_tells_what_it_goes_on_from(run) -> None:
    status = pb.JobStatus(
        job_id="clicks-aaa111",
        name="clicks",
        state=pb.FAILED,
        end_reason=pb.END_USER_ERROR,
        attempt=2,
        retries=1,
        from_step=20,
        step=35,
        total_steps=40,
        submitted_at=1e9,
        started_at=1e9 + 40,
        ended_at=1e9 + 55,
    )
    status.attempts.add(
        number=1,
        end_reason=pb.END_LOST_NODE,
        error="no heartbeat for 5 s",
        step=25,
        started_at=1e9 + 5,
        ended_at=1e9 + 30,
        price_per_hour=3.6,
    )
    status.cuts.add(step=20, taken_at=1e9 + 25, place="heterps://h:1/clicks-aaa111/cuts/20")
    status.cut_error = "cut 30: OSError: no room"
    archive.add(status, None, [])
    _, out, _ = run("status", "clicks")
    for part in (
        "cut 30: OSError: no room",
        "2 (retries: 1), from step 20",
        "steps 0 to 25, 5 of them lost (5.0 s, $0.0050)",
        "training again after 10 s",
        "1, the newest of step 20",
        "heterps submit --resume clicks-aaa111",
    ):
        assert part in " ".join(out.split()), part
    _, out, _ = run("status", "clicks", "--json")
    job = json.loads(out)
    assert (job["from_step"], job["cuts"][0]["step"], job["attempts"][0]["step"]) == (20, 20, 25)


def test_train_begins_with_the_weights_of_a_job_that_it_ran_before(job: Path) -> None:
    status = pb.JobStatus(job_id="clicks-aaa111", state=pb.SUCCEEDED, output="/runs/clicks-aaa111")
    status.cuts.add(step=20, place="s3://bucket/clicks-aaa111.cuts/20")
    archive.add(status, None, [])
    for named, place in (
        ("clicks-aaa111", "/runs/clicks-aaa111"),
        ("clicks-aaa@20", "s3://bucket/clicks-aaa111.cuts/20"),
    ):
        spec = load_job(job, [f"train.from={named}"])
        look_up_weights(spec)
        assert spec.train.warm_start == place
    spec = load_job(job, ["train.from=other"])
    with pytest.raises(UnknownJobError):
        look_up_weights(spec)
