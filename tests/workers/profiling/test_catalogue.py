"""The catalogue is whole: every type has what an estimate needs, every figure says where from."""

import datetime
from urllib.parse import urlsplit

import pytest

from protos.decision_pb2 import ResourceType
from workers.profiling.catalogue import (
    RATES,
    REQUIRED,
    computes_in_bf16,
    load_catalogue,
    with_data_sheet,
)

CATALOGUE = load_catalogue()
FIGURES = [(n, key, f) for n, kind in CATALOGUE.items() for key, f in kind.figures.items()]


def test_it_has_the_types_that_are_rented():
    assert set(CATALOGUE) >= {"cpu", "t4", "v100", "a10", "l4", "a100", "h100", "h200"}
    assert [name for name, kind in CATALOGUE.items() if kind.device == "cpu"] == ["cpu"]
    assert {kind.device for kind in CATALOGUE.values()} == {"cpu", "cuda"}


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_type_has_memory_bandwidth_rate_and_price(name):
    kind = CATALOGUE[name]
    assert all(kind.value(key) > 0 for key in REQUIRED), name
    known = {*REQUIRED, *RATES, "published_price_per_hour"}
    assert set(kind.figures) <= known
    # Tensor cores are faster than the rate without them, and memory slower than either.
    assert all(kind.value(key) > kind.value("fp32_flops_per_s") for key in RATES if kind.value(key))
    assert kind.value("memory_bandwidth") < kind.value("fp32_flops_per_s")


@pytest.mark.parametrize(("name", "key", "figure"), FIGURES, ids=lambda v: str(v)[:30])
def test_every_figure_has_a_source_and_a_date(name, key, figure):
    assert figure.value > 0
    assert figure.source.title
    address = urlsplit(figure.source.url)
    assert (address.scheme, bool(address.netloc)) == ("https", True)
    assert isinstance(figure.source.date, datetime.date)
    assert figure.source.date <= datetime.date(2100, 1, 1)
    if key == "price_per_hour":
        assert figure.source.title.startswith("list price,")


def test_the_published_pair_is_kept_beside_the_list_prices():
    published = {n: k.value("published_price_per_hour") for n, k in CATALOGUE.items()}
    assert {n: v for n, v in published.items() if v} == {"cpu": 0.04, "v100": 2.42}


def test_rates_are_filled_in_by_name_and_nothing_else():
    kind = with_data_sheet(ResourceType(name="V100", price_per_hour=1.0, limit=2))
    assert (kind.flops_per_s, kind.memory_bandwidth) == (1.57e13, 9.0e11)
    assert (kind.price_per_hour, kind.memory_bytes) == (1.0, 0.0)
    given = with_data_sheet(ResourceType(name="v100", flops_per_s=1e12))
    assert (given.flops_per_s, given.memory_bandwidth) == (1e12, 9.0e11)
    unknown = ResourceType(name="abacus")
    assert with_data_sheet(unknown) == unknown


def test_which_types_compute_in_bf16():
    able = {name: computes_in_bf16(ResourceType(name=name.upper())) for name in CATALOGUE}
    assert [name for name, does in able.items() if not does] == ["t4", "v100"]
    assert computes_in_bf16(ResourceType(name="abacus"))
