"""The catalogue of resource types: figures of data sheets and price lists, each with its source.

The data is `catalogue.yaml` beside this file.
"""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import yaml

from protos.decision_pb2 import ResourceType

# What an estimate and a price list need of every type.
REQUIRED = ("memory_bytes", "memory_bandwidth", "fp32_flops_per_s", "price_per_hour")
RATES = ("tf32_flops_per_s", "bf16_flops_per_s", "fp16_flops_per_s")
PUBLISHED = "published_price_per_hour"  # of the HeterPS paper's experiments


@dataclass(frozen=True, slots=True)
class Source:
    """Where a figure was read, and when."""

    title: str
    url: str
    date: datetime.date


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a type, in the unit that its key names."""

    value: float
    source: Source
    note: str = ""


@dataclass(frozen=True, slots=True)
class CatalogueType:
    """A resource type; `figures` has all keys of `REQUIRED`."""

    name: str
    title: str
    device: str
    figures: Mapping[str, Figure]

    def value(self, key: str) -> float:
        """The number of a figure; 0 where the type has none."""
        return self.figures[key].value if key in self.figures else 0.0

    def resource_fields(self) -> dict[str, str | float]:
        """What it says of the keys of a resources file; `limit` is the user's to know."""
        return {
            "device": self.device,
            "price_per_hour": self.value("price_per_hour"),
            "memory_bytes": self.value("memory_bytes"),
            # The trainer computes in float32, whose rate is the one without tensor cores.
            "flops_per_s": self.value("fp32_flops_per_s"),
            "memory_bandwidth": self.value("memory_bandwidth"),
        }


@lru_cache(maxsize=1)
def load_catalogue() -> Mapping[str, CatalogueType]:
    """All types by name, in the order of the file.

    Raises:
        KeyError: the file is not whole, which its test would have found.
    """
    text = files("workers.profiling").joinpath("catalogue.yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    sources = {key: Source(**value) for key, value in data["sources"].items()}
    return {
        name: CatalogueType(
            name=name,
            title=entry["title"],
            device=entry["device"],
            figures={key: _figure(figure, sources) for key, figure in entry["figures"].items()},
        )
        for name, entry in data["types"].items()
    }


def with_data_sheet(kind: ResourceType) -> ResourceType:
    """A copy of `kind`, its peak rates taken from the type of the same name where it has none.

    Rates are facts of the device; its price and memory are never filled in by name.
    """
    completed = ResourceType()
    completed.CopyFrom(kind)
    entry = load_catalogue().get(kind.name.lower())
    if entry is not None:
        completed.flops_per_s = kind.flops_per_s or entry.value("fp32_flops_per_s")
        completed.memory_bandwidth = kind.memory_bandwidth or entry.value("memory_bandwidth")
    return completed


def computes_in_bf16(kind: ResourceType) -> bool:
    """Whether a type does, by its name; one that is not in the catalogue is taken to."""
    entry = load_catalogue().get(kind.name.lower())
    return entry is None or entry.device != "cuda" or "bf16_flops_per_s" in entry.figures


def _figure(value: Mapping[str, Any], sources: Mapping[str, Source]) -> Figure:
    # YAML 1.1 takes 1e9 for text: the conversion makes both spellings numbers.
    return Figure(float(value["value"]), sources[value["source"]], value.get("note", ""))
