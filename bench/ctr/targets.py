"""What training a CTR network is to reach beside others, and whether it did."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.ctr.roster import AT_ONCE, DENSE, ENTRIES, MAIN, TBE, TBE_ONE

Turns = Mapping[str, Mapping[str, float]]
_SCALES = 1.8  # one thread's rate, which two of TBE have where cores are whole ones
_TBE = {True: 1.1, False: 1.0}
_NETWORKED, _AT_ONCE, _DENSE, _OTHER_S = 1.3, 0.9, 0.9, 0.045


def targets(rounds: Sequence[Turns]) -> Iterator[dict[str, Any]]:
    """Each with its limit, what was found and whether that is enough; None: not measured."""
    scaling = of_rates(rounds, TBE, TBE_ONE)
    whole = scaling is None or scaling >= _SCALES  # the more where it is not known
    text = f"two threads of FBGEMM TBE over one, which asks for {_TBE[whole]:g} times TBE's rate"
    yield {"target": text, "limit": "", "value": scaling, "met": None}
    yield _least("rate over FBGEMM TBE, one process", of_rates(rounds, MAIN, TBE), _TBE[whole])
    for name, entry in ENTRIES.items():
        if entry.networked:
            yield _least(f"rate over {entry.title}", of_rates(rounds, MAIN, name), _NETWORKED)
    ratio = of_rates(rounds, AT_ONCE, MAIN)
    yield _least("rate at staleness 0 over that at staleness 1", ratio, _AT_ONCE)
    text = "dense layers' FLOP in a CPU second over their best product's"
    yield _least(text, _median(rounds, _dense_share), _DENSE)
    other = _median(
        rounds,
        lambda one: one[MAIN]["cpu_s"] + one[MAIN]["server_cpu_s"] - one[DENSE]["cpu_s"],
    )
    yield {
        "target": "CPU seconds a step but for dense layers",
        "limit": f"<= {_OTHER_S:g}",
        "value": other,
        "met": None if other is None else other <= _OTHER_S,
    }


def of_rates(rounds: Sequence[Turns], one: str, other: str) -> float | None:
    """Median of the rounds' ratios of two contestants' rates; None where one did not run."""
    return _median(rounds, lambda of: of[one]["samples_per_s"] / of[other]["samples_per_s"])


def _dense_share(turns: Turns) -> float:
    of = turns[DENSE]
    return of["flop_per_cpu_s"] / of["best_flop_per_cpu_s"]


def _least(text: str, value: float | None, limit: float) -> dict[str, Any]:
    met = None if value is None else value >= limit
    return {"target": text, "limit": f">= {limit:g}", "value": value, "met": met}


def _median(rounds: Sequence[Turns], of: Callable[[Turns], float]) -> float | None:
    """Of the rounds; None where one lacks what is asked for."""
    try:
        return statistics.median(map(of, rounds))
    except KeyError:
        return None
