"""What a node's workers and profilers are forked from: all that each would import is here."""

import importlib
import sys

from chassis import rooms


def _top_level() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}


for _name in ("workers.stage.__main__", "workers.profiling.__main__"):
    importlib.import_module(_name)
_before = _top_level()
# What is imported when first used. For a backward from a later stage's gradient that is sympy.
for _name in (
    "torch.fx.experimental.symbolic_shapes",
    *("grpc._channel", "grpc._interceptor", "grpc._server"),
):
    importlib.import_module(_name)
rooms.imported_early(_top_level() - _before)
