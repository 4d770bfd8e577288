"""A model's state, saved once and loaded tied."""

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from workers.model.code.entry import ModelError
from workers.model.module.state import check_state, load_state, single


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5, bias=False)
        self.decoder.weight = self.embedding.weight
        self.again = self.decoder
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("part", torch.arange(6.0))
        self.register_buffer("middle", self.part[:3])


def test_shared_tensors_are_saved_once_and_loaded_tied():
    torch.manual_seed(0)
    trained = Tied()
    state = single(trained.state_dict())
    assert set(state) == {"embedding.weight", "empty", "part", "middle"}
    loaded = Tied()
    load_state(loaded, load(save(state)))
    assert loaded.decoder.weight is loaded.embedding.weight
    for name, tensor in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_a_state_that_does_not_fit_is_refused():
    state = single(Tied().state_dict())
    for broken in (
        {k: v for k, v in state.items() if k != "embedding.weight"},
        state | {"other": torch.zeros(1)},
        state | {"part": torch.zeros(7)},
    ):
        with pytest.raises(ModelError, match="its saved weights do not fit"):
            load_state(Tied(), broken)


class Extra(nn.Module):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


def buffered(tensor):
    module = nn.Module()
    module.register_buffer("odd", tensor)
    return module


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.LazyLinear(3), "nn.Linear"),
        (Extra(), "'0._extra_state' is dict"),
        (buffered(torch.eye(2).to_sparse()), "'0.odd' is torch.sparse_coo"),
    ],
)
def test_what_could_not_be_saved_is_refused_at_the_start(model, text):
    with pytest.raises(ModelError, match=text):
        check_state(nn.Sequential(model))
    check_state(Tied())
