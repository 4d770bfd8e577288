"""The notebook, cell by cell."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/quickstart.ipynb"


@pytest.mark.exhaustive
def test_from_a_data_frame_to_a_prediction(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["status"].state == "succeeded"
    assert names["status"].metrics["test_auc"] > 0.75
    frame, clicks = names["frame"][18_000:], names["clicks"].numpy()
    clicked = frame.clicked.to_numpy() == 1
    assert clicks[clicked].mean() > clicks[~clicked].mean() + 0.15
