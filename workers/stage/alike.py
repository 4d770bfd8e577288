"""What the workers of a stage must have alike before they train, and no seed of ours makes so."""

from collections import defaultdict
from hashlib import blake2b

import torch
from torch import Tensor, nn

from workers.links.all_reduce import StageGroup
from workers.model.code.entry import ModelError


def check_buffers(module: nn.Module, group: StageGroup) -> None:
    """Refuse buffers that each worker has made another one of; all workers of a stage call it.

    Parameters all have of the first one.

    Raises:
        ModelError: the first of them, and the remedy.
    """
    if group.size == 1:
        return
    names = {_digest(name.encode()): name for name, _ in module.named_buffers()}
    own = [[_digest(name.encode()), _of(buffer)] for name, buffer in module.named_buffers()]
    mine = torch.tensor(own, dtype=torch.int64).reshape(len(own), 2)
    found: dict[int, set[int]] = defaultdict(set)
    for name, value in group.gather(mine).tolist():
        found[name].add(value)
    for name, values in found.items():
        if len(values) > 1:
            raise ModelError(
                f"{names.get(name, 'a buffer')!r}: each of the stage's {group.size} workers has "
                "made another one of this buffer; expected what follows from train.seed, such as "
                "torch.randn(…) or np.random.default_rng(0), not np.random.default_rng(), a time "
                "or a host's name"
            )


def _of(tensor: Tensor) -> int:
    values = tensor.detach().cpu().resolve_conj().contiguous().reshape(-1)
    return _digest(values.view(torch.uint8).numpy().data)


def _digest(values: bytes | memoryview) -> int:
    return int.from_bytes(blake2b(values, digest_size=8).digest(), "little", signed=True)
