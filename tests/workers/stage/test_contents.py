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
