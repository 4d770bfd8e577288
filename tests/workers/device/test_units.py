"""A node's GPUs: each worker sees one, and none goes on without."""

from pathlib import Path

import pytest
import torch

from protos.node_pb2 import STAGE, LaunchRequest
from workers.device.units import gpus_of, least_used
from workers.node.processes import LaunchError, Processes


def test_each_worker_gets_the_gpu_that_the_fewest_have() -> None:
    assert gpus_of(2, {}) == ["0", "1"]
    assert gpus_of(2, {"CUDA_VISIBLE_DEVICES": "3, GPU-5a"}) == ["3", "GPU-5a"]
    gpus = gpus_of(3, {})
    taken = [least_used(gpus, used) for used in ([], ["0"], ["0", "2"], ["0", "1", "2"])]
    assert taken == ["0", "1", "1", "0"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch finds a GPU")
def test_a_worker_that_is_to_have_a_gpu_sees_its_own_and_does_not_go_on_without(
    tmp_path: Path,
) -> None:
    processes = Processes(tmp_path, "127.0.0.1", 60.0, gpus=["5", "7"])
    request = LaunchRequest(process_id="job.stage-0", job_id="job", role=STAGE, devices=["cuda"])
    request.stages.add(units=1)
    try:
        with pytest.raises(LaunchError, match=r"planned for a GPU.*CUDA_VISIBLE_DEVICES=5\)"):
            processes.launch(request)
    finally:
        processes.close(5.0)
