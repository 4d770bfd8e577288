"""What a training begins with: weights of a model, a cut, or a plain state_dict, by their names."""

import logging

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from workers.model.code.entry import ModelError
from workers.model.saved.warm_start import give_weights, read_weights


class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.body = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 4)


def saved(tmp_path, form, state):
    path = tmp_path / f"weights.{form}"
    save_file(state, path) if form == "safetensors" else torch.save(state, path)
    return str(path)


@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_weights_go_by_their_names_and_new_layers_are_named(tmp_path, form, caplog):
    torch.manual_seed(1)
    before, model = Net(), Net()
    state = {k: v for k, v in before.state_dict().items() if not k.startswith("head.")}
    state["old.weight"] = torch.ones(1)
    own = model.head.weight.clone()
    weights = read_weights(saved(tmp_path, form, state))
    with caplog.at_level(logging.WARNING):
        give_weights(model, weights, ["body", "norm", "head"], tell=True)
    for name, value in model.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(value, before.state_dict()[name]), name
    assert torch.equal(model.head.weight, own)
    assert "head (head.weight, head.bias)" in caplog.text
    assert "not in the model: old.weight" in caplog.text
    assert not weights.tables


def test_tied_weights_are_taken_by_any_of_their_names(tmp_path):
    model, value = Net(width=4), torch.full((4, 4), 2.0)
    model.head.weight = model.body.weight
    give_weights(model, read_weights(saved(tmp_path, "pt", {"head.weight": value})), [], tell=True)
    assert torch.equal(model.body.weight, value)
    assert model.head.weight is model.body.weight


def test_other_shapes_are_refused_by_file_key_and_both_shapes(tmp_path):
    path = saved(tmp_path, "pt", Net(width=5).state_dict())
    with pytest.raises(ModelError) as caught:
        give_weights(Net(), read_weights(path), [], tell=True)
    for told in (path, "body.weight", "[5, 4]", "[3, 4]"):
        assert told in str(caught.value)


class Evil:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    "content", [{"x": Evil()}, {"x": [1]}, [torch.ones(1)], {3: torch.ones(1)}]
)
def test_anything_but_tensors_by_name_is_refused(tmp_path, content, capsys):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(ModelError, match=r"w\.pt"):
        read_weights(str(tmp_path / "w.pt"))
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"no tensors", None])
def test_a_file_that_is_none_or_missing_is_refused(tmp_path, content):
    for name in ("w.pt", "w.safetensors", "folder"):
        path = tmp_path / name
        if content is not None and name != "folder":
            path.write_bytes(content)
        with pytest.raises(ModelError, match=name):
            read_weights(str(path))


def test_a_state_dict_of_another_model_is_refused(tmp_path):
    weights = read_weights(saved(tmp_path, "pt", {"other.weight": torch.ones(2)}))
    with pytest.raises(ModelError, match=r"other\.weight"):
        give_weights(Net(), weights, [], tell=True)
