"""Brings a workload's figures in line with what its running plan was measured to take.

What is changed, and nothing else:

- **Computation.** A stage's busy seconds, in which it waits for nobody, less those that it is busy
  for the stages beside it, over its predicted CT scale `compute_s` of each of its layers on its
  type: each stage by its own ratio.
- **Communication** is not measured by itself; the pipeline's pace bounds it. No stage communicates
  longer than the pace, so a longer DT is scaled down to it. Where the plan's slowest stage was to
  be bound by communication and no stage's computing explains the pace, that stage's DT is the
  pace. DT is scaled through `sync_s` of the stage's layers and `transfer_s` of its last.
- **Measured** is what a layer's figures are from then on if the term that bounds its stage was.
- **Inheritance.** Layers that did not run on a type and have only estimates there share the data
  sheet that was wrong about those that did: their `compute_s` is scaled by the square root of the
  ratio of the stages that ran on estimates there (geometric mean, weighted by CT). They stay
  estimates.
- **Caution**, where it is asked for: a type that was slower than its profile on what ran there is
  taken to be as much slower on every other layer; one that was faster is not taken to be so.
- Stages on an emulated type say nothing about that type, and a plan with one nothing about pace.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.problem.plan import PlanStage
from scheduler.problem.workload import LayerCost, Resources, Workload
from scheduler.replanning.measure import Filtered, Measurement

INHERITED = 0.5  # exponent: the part of a ratio that layers which did not run take over
EXPLAINED = 0.9  # a stage busy for this share of the pace is what bounds it


@dataclass(frozen=True, slots=True)
class StageRatio:
    """Measured over predicted seconds of a stage, None where nothing was learned."""

    compute: float | None = None
    communication: float | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """The updated workload, and what was learned of each stage; `pace_s` is None if unknown."""

    workload: Workload
    ratios: tuple[StageRatio, ...]
    pace_s: float | None

    @property
    def learned(self) -> bool:
        """Whether the measurement told anything."""
        learned = (one.compute is not None or one.communication is not None for one in self.ratios)
        return self.pace_s is not None or any(learned)


def calibrate(
    workload: Workload,
    resources: Resources,
    stages: Sequence[PlanStage],
    measurement: Measurement,
    filled: float = 1.0,
    micro_batches: int = 0,
    *,
    cautious: bool = False,
) -> Calibration:
    """Update `workload` by the measurement of a plan that was made from it.

    Args:
        stages: the plan's, with the times that `workload` predicted.
        measurement: of as many stages; those with too few windows are left out.
        filled: the share of the pace that the slowest stage works in that plan; less than 1 where
            the pipeline fills and drains.
        micro_batches: of a step; 0 where it is not known, and nothing of them priced by itself.
        cautious: see above; all else is what is most likely.
    """
    emulated = {kind.name for kind in resources.types if kind.emulated}
    pace_s = None
    if measurement.pace.counts and not any(stage.type in emulated for stage in stages):
        pace_s = measurement.pace.seconds
    busy = dict(enumerate(measurement.busy))
    computing = [one.seconds for one in measurement.busy if one.counts]
    working_s = pace_s * filled if pace_s is not None else None
    explained = working_s is not None and max(computing, default=0.0) >= EXPLAINED * working_s
    slowest = max(stages, key=lambda stage: stage.busy_s, default=None)
    ratios = tuple(
        StageRatio(
            None
            if stage.type in emulated
            else _compute(
                stage,
                busy.get(number, Filtered()),
                _handled_s(workload, resources, stage, micro_batches),
            ),
            _communication(stage, working_s, stage is slowest and not explained),
        )
        for number, stage in enumerate(stages)
    )
    layers = [dict(layer.cost) for layer in workload.layers]
    for stage, ratio in zip(stages, ratios, strict=True):
        _scale(layers, stage, ratio)
    inherited = _inherited(workload, stages, ratios)
    slower = _slower(stages, ratios) if cautious else {}
    for kind in {*inherited, *slower}:
        ran = {n for stage in stages if stage.type == kind for n in _rows(stage)}
        for number, costs in enumerate(layers):
            cost = costs.get(kind)
            if number in ran or cost is None:
                continue
            factor = max(inherited.get(kind, 1.0) if cost.estimated else 1.0, slower.get(kind, 0.0))
            costs[kind] = cost.slower(factor)
    updated = tuple(
        replace(layer, cost=costs) for layer, costs in zip(workload.layers, layers, strict=True)
    )
    return Calibration(replace(workload, layers=updated), ratios, pace_s)


def _handled_s(
    workload: Workload, resources: Resources, stage: PlanStage, micro_batches: int
) -> float:
    """Seconds a sample that a stage is busy for those beside it."""
    kind = next(kind for kind in resources.types if kind.name == stage.type)
    if not (micro_batches and kind.is_cpu):
        return 0.0
    size = (workload.batch or workload.reference_batch) / micro_batches
    ends = [stage.first - 1] * (stage.first > 0)
    ends += [stage.last] * (stage.last < len(workload.layers) - 1)
    each = [workload.handling_s / size + workload.layers[end].passing_s for end in ends]
    return sum(each) / stage.units


def _compute(stage: PlanStage, busy: Filtered, handled_s: float) -> float | None:
    if not busy.counts or stage.compute_s <= 0 or busy.seconds <= handled_s:
        return None
    return (busy.seconds - handled_s) / stage.compute_s


def _communication(stage: PlanStage, working_s: float | None, to_blame: bool) -> float | None:
    if working_s is None or stage.transfer_s <= 0:
        return None
    bound_here = to_blame and stage.transfer_s > stage.compute_s
    return working_s / stage.transfer_s if bound_here or stage.transfer_s > working_s else None


def _scale(layers: list[dict[str, LayerCost]], stage: PlanStage, ratio: StageRatio) -> None:
    communicates = stage.transfer_s > stage.compute_s
    measured = (ratio.communication if communicates else ratio.compute) is not None
    for number in _rows(stage):
        cost = layers[number][stage.type]
        sync_s, transfer_s, delay_s = cost.sync_s, cost.transfer_s, cost.delay_s
        if ratio.communication is not None:
            sync_s *= ratio.communication
            delay_s *= ratio.communication
            if number == stage.last < len(layers) - 1:
                transfer_s *= ratio.communication
        layers[number][stage.type] = replace(
            cost if ratio.compute is None else cost.slower(ratio.compute),
            sync_s=sync_s,
            transfer_s=transfer_s,
            delay_s=delay_s,
            estimated=cost.estimated and not measured,
        )


def _inherited(
    workload: Workload, stages: Sequence[PlanStage], ratios: Sequence[StageRatio]
) -> Mapping[str, float]:
    """By type, what estimates there are scaled by."""
    logs: dict[str, list[tuple[float, float]]] = {}
    for stage, ratio in zip(stages, ratios, strict=True):
        guessed = any(workload.layers[n].cost[stage.type].estimated for n in _rows(stage))
        if guessed and ratio.compute is not None:
            pair = (stage.compute_s, math.log(ratio.compute))
            logs.setdefault(stage.type, []).append(pair)
    return {
        kind: math.exp(INHERITED * sum(w * log for w, log in pairs) / sum(w for w, _ in pairs))
        for kind, pairs in logs.items()
    }


def _slower(stages: Sequence[PlanStage], ratios: Sequence[StageRatio]) -> Mapping[str, float]:
    """By type, the most that a stage there is slower than its profile."""
    most: dict[str, float] = {}
    for stage, ratio in zip(stages, ratios, strict=True):
        if ratio.compute is not None:
            most[stage.type] = max(ratio.compute, most.get(stage.type, 1.0))
    return most


def _rows(stage: PlanStage) -> range:
    return range(stage.first, stage.last + 1)
