"""A trained model on disk: dense weights, tables, and what is needed to run it again.

Layout of OUTPUT: `dense.safetensors`, `tables/` (a parameter-server checkpoint), `loss.csv`,
and `model.json`, which is written last: a folder without it is no model.
"""

import json
import os
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from protos.job_pb2 import JobSpec
from protos.naming import table_prefix
from workers.layers.sparse_embedding import SparseEmbedding
from workers.model import ModelError, job_model

FORMAT = "heterps-model-1"


class SavedModel:
    """The folder being written: OUTPUT.partial until it is complete."""

    def __init__(self, output: str) -> None:
        self.final = Path(output)
        self.folder = self.final.with_name(self.final.name + ".partial")
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def tables(self) -> str:
        """Where the parameter servers save."""
        return str(self.folder / "tables")

    def write_stage(self, stage: int, state: dict[str, Tensor]) -> None:
        """Write one stage's dense weights."""
        path = self.folder / f"stage-{stage}.safetensors"
        tensors = {name: t.detach().cpu().contiguous() for name, t in state.items()}
        save_file(tensors, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)

    def finish(self, job: JobSpec, stages: int, losses: list[float], facts: dict[str, Any]) -> Path:
        """Merge the stages' weights, write the manifest and give the folder its name."""
        merged: dict[str, Tensor] = {}
        parts = [self.folder / f"stage-{i}.safetensors" for i in range(stages)]
        for part in parts:
            merged.update(load_file(part))
        save_file(merged, self.folder / "dense.safetensors")
        for part in parts:
            part.unlink()
        lines = ["step,loss", *(f"{step},{loss:.9g}" for step, loss in enumerate(losses, 1))]
        (self.folder / "loss.csv").write_text("\n".join(lines) + "\n")
        manifest = {
            "format": FORMAT,
            "job": MessageToDict(job, preserving_proto_field_name=True),
            **facts,
        }
        temporary = self.folder / "model.json.tmp"
        temporary.write_text(json.dumps(manifest, indent=2) + "\n")
        os.replace(temporary, self.folder / "model.json")
        os.replace(self.folder, self.final)
        return self.final


def load(path: str | Path) -> nn.Module:
    """A saved model, ready to predict in this process: `forward(sparse, dense)`.

    Raises:
        ModelError: the folder is no saved model, or its code has moved.
    """
    from ps import LocalTable

    folder = Path(path)
    manifest = folder / "model.json"
    if not manifest.is_file():
        raise ModelError(f"{folder}: no saved model: model.json is missing")
    facts = json.loads(manifest.read_text())
    if facts.get("format") != FORMAT:
        raise ModelError(f"{manifest}: format: {facts.get('format')!r}; expected {FORMAT!r}")
    job = ParseDict(facts["job"], JobSpec())
    model = job_model(job)
    model.load_state_dict(load_file(folder / "dense.safetensors"), strict=True)
    tables = LocalTable.load_checkpoint(folder / "tables")
    for layer in model.modules():
        if isinstance(layer, SparseEmbedding):
            layer.store = tables[table_prefix(facts["job_id"]) + layer.spec.table]
    return model.eval()
