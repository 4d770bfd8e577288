"""What the processes of a node's workers are forked from: all that each would import is here."""

import importlib

from workers.stage.__main__ import main

__all__ = ["main"]

# What is imported when first used. For torch's optimizers that is a compiler, longer than torch.
for _name in ("torch._dynamo", "grpc._channel", "grpc._interceptor", "grpc._server"):
    importlib.import_module(_name)
