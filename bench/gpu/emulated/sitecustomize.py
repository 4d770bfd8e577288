"""On PYTHONPATH: processes take the emulated kernels for those of a GPU, and their arrays as well.

HETERPS_EMULATED_OPS names the module that `tests.cuda.emulate.build` made.
"""

import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Native(Loader):
    """`workers.ops.native`, whose arrays are all for kernels."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        module.on_cuda = lambda tensor: True  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "workers.ops._ops":
            file = os.environ["HETERPS_EMULATED_OPS"]
            return importlib.util.spec_from_loader(name, ExtensionFileLoader(name, file))
        if name == "workers.ops.native":
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = _Native(spec.loader)
            return spec
        return None


if "HETERPS_EMULATED_OPS" in os.environ:
    sys.meta_path.insert(0, _Finder())
