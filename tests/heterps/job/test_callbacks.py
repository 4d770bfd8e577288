"""Callbacks of a job file, and whose files a training depends on."""

import pytest
import yaml

from heterps.job.file import JobFileError, load_job
from heterps.job.rewrite import job_content
from protos.job_pb2 import JobSpec
from protos.node_pb2 import LaunchRequest
from protos.scheduler_pb2 import END_USER_ERROR
from workers.errors import CallbackError
from workers.model.saved.cut import UnfitCutError
from workers.stage.cuts.beginning import check_entry
from workers.stage.report.failure import end_reason_of

GIVEN = ("model.callbacks=[watch.py:Watch]", "model.callback_args={Watch: {below: 0.5, tags: [a]}}")


@pytest.fixture
def watched(job):
    (job.parent / "watch.py").write_text("class Watch: ...\nclass Other: ...\n")
    return job


def test_callbacks_are_read_and_written_again(watched):
    spec = load_job(watched, GIVEN)
    assert list(spec.model.callbacks) == ["watch.py:Watch"]
    assert dict(spec.model.callback_args["Watch"]) == {"below": 0.5, "tags": ["a"]}
    content = job_content(spec)
    assert content["model"]["callbacks"] == [f"{watched.parent}/watch.py:Watch"]
    (watched.parent / "again.yaml").write_text(yaml.safe_dump(content))
    again = load_job(watched.parent / "again.yaml")
    assert again.model.callback_args == spec.model.callback_args


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (["model.callbacks=[watch.py:Wach]"], "did you mean watch.py:Watch"),
        (["model.callbacks=[gone.py:Watch]"], "gone.py"),
        (["model.callbacks=[watch.py:Watch, ./watch.py:Watch]"], "'Watch' twice, expected"),
        ([GIVEN[0], "model.callback_args={Wach: {}}"], "a name of model.callbacks; did you mean"),
        ([GIVEN[0], "model.callback_args={Watch: 3}"], "a mapping of argument names to values"),
    ],
)
def test_what_is_wrong_with_them_is_said(watched, assignments, expected):
    with pytest.raises(JobFileError) as caught:
        load_job(watched, assignments)
    assert expected in str(caught.value)


def test_a_training_depends_on_the_files_of_its_model_and_what_goes_with_it(watched):
    (watched.parent / "losses.py").write_text(
        "from parts.sums import total_of\ndef total(outputs, batch): ...\n"
    )
    (watched.parent / "parts").mkdir()
    (watched.parent / "parts" / "sums.py").write_text("from . import more\ntotal_of = sum\n")
    (watched.parent / "parts" / "more.py").write_text("")
    (watched.parent / "unused.py").write_text("")
    (watched.parent / "recalls.py").write_text("def recall(outputs, batch): ...\n")
    given = (*GIVEN, "model.loss=losses.py:total", "model.metrics=[recalls.py:recall]")
    spec = load_job(watched, given)
    check_entry(spec)
    (watched.parent / "unused.py").write_text("changed = True\n")
    check_entry(spec)
    for name in ("losses.py", "watch.py", "recalls.py", "parts/sums.py", "parts/more.py"):
        file = watched.parent / name
        text = file.read_text()
        file.write_text(text + "changed = True\n")
        named = "losses.py" if file.parent.name == "parts" else file.name
        with pytest.raises(UnfitCutError, match=rf"{named}.* has changed since the job was submit"):
            check_entry(spec)
        sent = JobSpec()
        sent.CopyFrom(spec)
        sent.code_digest = "of the code that came along"
        check_entry(sent)
        file.write_text(text)


def test_a_connection_that_a_callback_loses_is_its_own_affair():
    error = CallbackError("watch.py:Watch: on_step after step 3: ConnectionError: gone")
    error.__cause__ = ConnectionError("gone")
    assert end_reason_of(error, LaunchRequest().job) == END_USER_ERROR
