"""Training goes on with the data that it has had so far, or not at all."""

from dataclasses import replace

import pytest

from protos.job_pb2 import JobSpec
from workers.model.saved.cut import UnfitCutError
from workers.stage.cuts.beginning import Beginning
from workers.stage.cuts.kept import of_chunks, to_chunks
from workers.stage.cuts.state import StageState


def test_other_data_than_so_far_is_refused_by_name():
    job = JobSpec()
    job.data.train = "train.csv"
    begun = Beginning(3, state=StageState.of_layers([{}]), contents="as it was")
    kept = of_chunks(to_chunks(begun))
    kept.check_contents("as it was", job)
    with pytest.raises(UnfitCutError, match=r"data\.train: train\.csv: other contents than step 3"):
        kept.check_contents("other", job)
    replace(begun, contents="").check_contents("other", job)  # of a cut that does not say


def test_held_out_data_is_compared_by_whoever_reads_it():
    job = JobSpec()
    job.data.train, job.data.test = "train.csv", "test.csv"
    begun = Beginning(3, contents="as it was\nthis, too")
    begun.check_contents("as it was", job)  # of a worker that measures nothing
    replace(begun, contents="as it was").check_contents("as it was\nother", job)
    with pytest.raises(UnfitCutError, match=r"data\.test: test\.csv: other contents than step 3"):
        begun.check_contents("as it was\nother", job)
