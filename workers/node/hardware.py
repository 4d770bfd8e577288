"""What a host has for a type of units."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path


class DeviceError(RuntimeError):
    """This host has not got what the node's type promises."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a node's units are.

    Attributes:
        name: for people.
        units: how many there are.
        cores: of the host, where the units compute on them; 0 where they do not.
        bf16: whether they compute in it.
    """

    name: str
    units: int
    cores: int = 0
    bf16: bool = True


def find_hardware(kind: str, device: str, emulate: bool) -> Hardware:
    """The hardware of this host for a type.

    Raises:
        DeviceError: the type needs a CUDA device and there is none.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = affinity or 1
    if device == "cpu":
        return Hardware(_processor(), cores, cores)
    if emulate:
        return Hardware(f"{kind}, emulated on {_processor()}", 1, cores)
    import torch  # takes seconds: only where a GPU is claimed

    if not torch.cuda.is_available():
        raise DeviceError(
            f"--type {kind}: needs a CUDA device and this host has none that PyTorch "
            f"{torch.__version__} can use; expected a GPU and its driver, or --emulate to plan "
            "with the type and run it on the CPU"
        )
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Hardware(torch.cuda.get_device_name(0), torch.cuda.device_count(), bf16=bf16)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
