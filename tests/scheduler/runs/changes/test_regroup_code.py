"""Code that is read where it lies may be edited: all workers of a job have the same, or it ends."""

import os
import signal

from protos.scheduler_pb2 import END_INVALID_JOB
from tests.scheduler.runs.survivors import FAULT, Service, trains


def test_a_worker_that_is_replaced_has_the_code_of_the_others(service: Service) -> None:
    (service.directory / "edited.py").write_text(FAULT)
    entry = {"model.entry": "edited.py:held"}
    job = service.submit(service.may_be_held("edited", retries=1, **entry))
    trains(service, job, 2)
    with service.held():
        with (service.directory / "edited.py").open("a") as file:
            file.write("from torch import nn\nnn.GELU = nn.Tanh\n")
        os.kill(service.pids(job)["stage 1 worker 1"], signal.SIGKILL)
    status = service.end(job)
    assert status.end_reason == END_INVALID_JOB, status.reason
    assert "edited.py has changed since the job was submitted" in status.error
