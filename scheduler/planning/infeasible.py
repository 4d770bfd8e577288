"""Why no plan meets the demands: what binds, and the highest throughput that can be."""

import math
from collections.abc import Iterable

import numpy as np

from scheduler.decision.record import Decision, Relaxation
from scheduler.problem.cost import TOLERANCE, CostModel
from scheduler.problem.plan import Plan
from scheduler.problem.wording import buffers_changed, listed, money_text, rate_text, units_text
from scheduler.problem.workload import Layer


def barred(model: CostModel) -> str:
    """Name the layers to which pins, exclusions and costs leave no type, or return nothing."""
    rows = np.flatnonzero(~model.allowed.any(axis=1))
    if not rows.size:
        return ""
    layers = [model.workload.layers[row] for row in rows]
    if model.joined[rows].any():
        names = listed([layer.name for layer in layers])
        return f"layers {names} stay in one stage, and no type may run all of them"
    kinds = sorted({kind for layer in layers for kind in layer.cost})
    disks = {kind.name: kind.ssd_bytes for kind in model.resources.types if kind.ssd_bytes}
    needed = sum(layer.disk_bytes for layer in model.workload.layers)
    if all(layer.disk_bytes and 0 < disks.get(k, 0) < needed for layer in layers for k in kinds):
        most = max(disks[kind] for kind in kinds)
        return (
            f"experts out of memory take {needed:.3g} bytes of disk, and a unit of "
            f"{' or '.join(kinds)} has {most:.3g} at most (ssd_bytes)"
        )
    types = " and ".join(kinds)
    plural = len(layers) > 1
    return (
        f"{'layers' if plural else 'layer'} {listed([layer.name for layer in layers])} may run on "
        f"{types} alone, which {'is' if len(kinds) == 1 else 'are'} excluded"
    )


def why_no_plan(decision: Decision, fastest: Plan | None = None) -> str:
    """Say what binds where no plan meets the demands of `decision`.

    Args:
        fastest: the fastest plan within limits and cap, where one was found.
    """
    floor, cap, top = decision.aim, decision.max_price_per_hour, decision.max_throughput
    priced = f" for at most {money_text(cap)} an hour" if cap else ""
    needed = _change(decision, "max_price_per_hour")
    if needed is not None and floor <= 0:
        return (
            f"no plan costs at most {money_text(cap)} an hour; the least is "
            f"{money_text(needed.needed, up=True)}"
        )
    if top <= 0 and needed is None:
        return f"no plan can run: {decision.plan.reason}"
    # The bound is infinite once it is proven that there is none.
    proven = math.isinf(decision.lower_bound)
    text = f"no plan {'reaches' if proven else 'was found that reaches'} {rate_text(floor)} "
    text += f"samples/s{priced}; "
    if top <= 0:
        text += "none costs that little at any speed"
    elif top < floor * (1 - TOLERANCE):
        # Of steps that overlap, or are flushed, the highest is not proven.
        proven &= decision.plan.staleness is None
        most = "that can be" if proven else "found"
        text += f"the highest throughput {most} is {rate_text(top, down=True)}"
    else:
        return f"{text}the search ended before it was proven that there is none"
    if needed is not None:
        return f"{text}, and the floor takes at least {money_text(needed.needed, up=True)} an hour"
    return f"{text}. {_binding(decision, fastest)}"


def _binding(decision: Decision, fastest: Plan | None) -> str:
    """Name the limit that alone stands in the way, else what stops the fastest plan."""
    limits = [c for c in decision.relaxations if c.key.startswith("limit.")]
    if limits:
        kind = limits[0].key.removeprefix("limit.")
        return (
            f"The limit of {units_text(int(limits[0].current), kind)} binds: "
            f"{int(limits[0].needed):,} would do"
        )
    if fastest is None or decision.workload is None:
        return f"The fastest plan {decision.plan.reason if fastest is None else fastest.reason}"
    slowest = (stage for stage in fastest.stages if stage.bottleneck)
    layers = [one for s in slowest for one in decision.workload.layers[s.first : s.last + 1]]
    return f"The fastest plan {fastest.reason}{alone_among(layers)}"


def alone_among(layers: Iterable[Layer]) -> str:
    """Name those of layers in a stage of one unit, to be put behind what they are the cause of."""
    names = [layer.name for layer in layers if layer.alone]
    return f"; {buffers_changed(names)}, for which a stage has one unit" if names else ""


def cheapest_change(change: Relaxation) -> str:
    """Say in a sentence what the change is and what plan it makes possible."""
    figures = f"{money_text(change.cost)} at {rate_text(change.throughput)} samples/s"
    head, _, kind = change.key.partition(".")
    what = {
        "min_throughput": f"a floor of {rate_text(change.needed, down=True)} samples/s instead of "
        f"{rate_text(change.current)}",
        "max_price_per_hour": f"a cap of {money_text(change.needed, up=True)} an hour instead of "
        f"{money_text(change.current)}",
        "limit": f"{units_text(int(change.needed), kind)} instead of {int(change.current):,}",
        "allow": f"allowing {kind}",
    }[head]
    return f"The cheapest change with which a plan exists is {what}: {figures}."


def _change(decision: Decision, key: str) -> Relaxation | None:
    return next((change for change in decision.relaxations if change.key == key), None)
