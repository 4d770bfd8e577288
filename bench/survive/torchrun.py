"""A worker of torchrun, with torch.distributed.checkpoint.

python -m torch.distributed.run --standalone --nproc-per-node 4 --max-restarts 1000 \\
    --monitor-interval 0.1 -m bench.survive.torchrun SETTINGS

SETTINGS is a file of JSON, see `bench.survive.plain.Settings`. That interval, at which torchrun
looks whether its workers live, is also its default.
"""

import os
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from bench.survive.plain import Settings, State, settings_of, train


def work(settings: Settings) -> None:
    """Train, from the newest checkpoint if there is one."""
    told = os.environ
    store = dist.TCPStore(told["MASTER_ADDR"], int(told["MASTER_PORT"]), is_master=False)
    dist.init_process_group(  # by names of its own: the addresses of those before are still there
        "gloo",
        store=dist.PrefixStore(f"restart {told['TORCHELASTIC_RESTART_COUNT']}", store),
        rank=int(told["RANK"]),
        world_size=int(told["WORLD_SIZE"]),
    )
    newest = Path(settings.folder, "newest")

    def load(state: State) -> int:
        if not newest.exists():
            return 0
        step = int(newest.read_text())
        model, optimizer = get_state_dict(state["model"], state["optimizer"])
        saved = {"model": model, "optimizer": optimizer}
        checkpoint.load(saved, checkpoint_id=Path(settings.folder, str(step)))
        set_state_dict(
            *(state["model"], state["optimizer"]),
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
        return step

    def save(state: State, step: int) -> None:
        model, optimizer = get_state_dict(state["model"], state["optimizer"])
        folder = Path(settings.folder, str(step))
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        if dist.get_rank() == 0:
            newest.with_suffix(".part").write_text(str(step))
            newest.with_suffix(".part").replace(newest)

    train(settings, dist.get_rank(), load, save)
    dist.destroy_process_group()


if __name__ == "__main__":
    work(settings_of(sys.argv[1]))
