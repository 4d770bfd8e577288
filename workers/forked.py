"""What a node's workers and profilers are forked from: all that each would import is here."""

import importlib

for _name in ("workers.stage.__main__", "workers.profiling.__main__"):
    importlib.import_module(_name)
for _name in ("grpc._channel", "grpc._interceptor", "grpc._server"):  # else when first used
    importlib.import_module(_name)
