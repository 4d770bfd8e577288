"""What the processes of a node's workers are forked from: all that each would import is here."""

import importlib
import sys

from chassis import rooms
from workers.stage.__main__ import main

__all__ = ["main"]


def _top_level() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}


_before = _top_level()
# What is imported when first used. For torch's optimizers that is a compiler, longer than torch.
for _name in ("torch._dynamo", "grpc._channel", "grpc._interceptor", "grpc._server"):
    importlib.import_module(_name)
rooms.imported_early(_top_level() - _before)
