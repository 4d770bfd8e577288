"""Ray Train with checkpoints of its own, on a Ray of this machine that begins and ends with it.

    python -m bench.survive.raytrain SETTINGS

SETTINGS is a file of JSON, see `bench.survive.plain.Settings`. Ray recovers as fast as its settings
let it: it looks after its workers every 0.1 s instead of every 2 s, gives those that are left 1 s
instead of 30 s to leave their process group, has twice as many processors as there are workers, so
that none waits for those that end, imports torch into its processes before they are taken, tries
again without end or pause, and copies checkpoints to the disk while training goes on (`SOONER`,
of which the environment may have others).
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import ray
import ray.train
import torch
from ray.train import Checkpoint, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from bench.survive.plain import Settings, State, settings_of, train

SOONER: Final = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "1",
    "RAY_preload_python_modules": "torch,torch.nn.parallel,ray.train.torch",
}
_FILE = "state.pt"


def work(told: dict[str, Any]) -> None:
    """Train, from the newest checkpoint if there is one: a worker."""
    rank = ray.train.get_context().get_world_rank()

    def load(state: State) -> int:
        newest = ray.train.get_checkpoint()
        if newest is None:
            return 0
        with newest.as_directory() as folder:
            saved = torch.load(Path(folder, _FILE), weights_only=True)
        state["model"].load_state_dict(saved["model"])
        state["optimizer"].load_state_dict(saved["optimizer"])
        return int(saved["step"])

    def save(state: State, step: int) -> None:
        checkpoint = None
        if rank == 0:
            folder = tempfile.mkdtemp(dir="/dev/shm")
            saved = {name: what.state_dict() for name, what in state.items()}
            torch.save({**saved, "step": step}, Path(folder, _FILE))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(
            {"step": step},
            checkpoint=checkpoint,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=True,
        )

    train(Settings(**told["settings"]), rank, load, save)


def main(file: str) -> None:
    """Train, whatever dies."""
    settings = settings_of(file)
    ray.init(num_cpus=2 * settings.workers, include_dashboard=False, object_store_memory=2**27)
    TorchTrainer(
        work,
        train_loop_config={
            "settings": {name: getattr(settings, name) for name in settings.__slots__}
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=settings.workers, use_gpu=False),
        run_config=RunConfig(
            name="survive",
            storage_path=settings.folder,
            failure_config=FailureConfig(max_failures=-1),
        ),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    for name, value in SOONER.items():
        os.environ.setdefault(name, value)
    main(sys.argv[1])
