"""The devices that ops are tested on."""

import pytest
import torch


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU, or a torch without CUDA")
    return str(request.param)
