"""What a proposal says in sentences: what was learned, what each plan costs, and what to do."""

from scheduler.decision.record import Decision
from scheduler.problem.plan import PlanStage
from scheduler.problem.wording import money_text, rate_text, sentence, time_text
from scheduler.replanning.calibrate import Calibration
from scheduler.replanning.measure import Measurement
from scheduler.replanning.proposal import Floor, Proposal, Threshold

_UNEQUAL = 0.02  # a ratio nearer to 1 is as predicted


def reasons(
    proposal: Proposal,
    decision: Decision,
    calibration: Calibration,
    measurement: Measurement,
    floor: Floor,
    threshold: Threshold,
) -> list[str]:
    """The sentences of a proposal to leave the plan of `decision`."""
    lines = _learned(decision, calibration, measurement)
    if proposal.overhead > 1 + _UNEQUAL:
        lines.append(
            f"The pipeline takes {proposal.overhead:.2f} times as long as its stages explain; the "
            "same is expected of any other plan."
        )
    lines += _costs(proposal)
    lines.append(_conclusion(proposal, floor, threshold))
    return lines


def _learned(decision: Decision, calibration: Calibration, measurement: Measurement) -> list[str]:
    """What each stage was measured to take."""
    lines = []
    assert decision.resources is not None
    emulated = {kind.name for kind in decision.resources.types if kind.emulated}
    for number, (stage, ratio) in enumerate(zip(decision.stages, calibration.ratios, strict=True)):
        name = f"Stage {number} ({_layers(decision, stage)} on {stage.type})"
        if stage.type in emulated:
            lines.append(f"{name} is emulated: its times say nothing about {stage.type}.")
            continue
        if ratio.compute is not None:
            busy = measurement.busy[number]
            lines.append(
                f"{name} computes {time_text(busy.seconds)} a sample, {_against(ratio.compute)} "
                f"{time_text(stage.compute_s)} ({_windows(busy.windows)})."
            )
        if ratio.communication is not None:
            lines.append(
                f"{name} communicates {time_text(stage.transfer_s * ratio.communication)} a "
                f"sample by the pipeline's pace, {_against(ratio.communication)} "
                f"{time_text(stage.transfer_s)}."
            )
    if not calibration.learned:
        most = max((one.windows for one in (*measurement.busy, measurement.pace)), default=0)
        lines.append(f"Too little was measured to change the profile ({_windows(most)}).")
    return lines


def _costs(proposal: Proposal) -> list[str]:
    current, proposed = proposal.current, proposal.proposed
    stay = (
        f"The remaining {proposal.remaining_samples:,.0f} samples cost "
        f"{money_text(proposal.current_cost)} with the running plan"
    )
    if not proposed.feasible or not proposal.moves:
        return [f"{stay}."]
    rates = [rate_text(plan.throughput / proposal.overhead) for plan in (current, proposed)]
    lines = [
        f"{stay} ({_units(current.stages)}; {rates[0]} samples/s) and "
        f"{money_text(proposal.proposed_cost)} with {_units(proposed.stages)} "
        f"({rates[1]} samples/s)."
    ]
    if proposal.moving_s > 0:
        lines.append(
            f"Moving takes {proposal.moving_s:,.0f} s and {money_text(proposal.moving_cost)}, "
            "because the units of both plans are paid meanwhile."
        )
    return lines


def _conclusion(proposal: Proposal, floor: Floor, threshold: Threshold) -> str:
    if not proposal.proposed.feasible:
        return sentence(f"No other plan is proposed: {proposal.proposed.plan.reason}")
    if not proposal.moves:
        return "The running plan stays the best."
    if proposal.worthwhile and floor.missed:
        return (
            f"Proposed: the running plan makes {rate_text(floor.expected)} samples/s, the floor "
            f"is {rate_text(floor.demanded)}; the other one meets it."
        )
    if proposal.worthwhile:
        net = proposal.net_savings
        return f"Proposed: it saves {money_text(net)} ({net / proposal.current_cost:.0%})."
    saves = f"saving {money_text(proposal.savings)}" if proposal.savings > 0 else "saving nothing"
    least = f"{threshold.share:.0%} of the remaining cost"
    if proposal.moving_cost > 0:
        least += f" and {1 + threshold.margin:.2g} times the cost of moving"
    return f"Not proposed: {saves} is too little; expected more than {least}."


def _layers(decision: Decision, stage: PlanStage) -> str:
    assert decision.workload is not None
    names = [layer.name for layer in decision.workload.layers[stage.first : stage.last + 1]]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _units(stages: tuple[PlanStage, ...]) -> str:
    return ", ".join(f"{stage.units} x {stage.type}" for stage in stages)


def _against(ratio: float) -> str:
    if abs(ratio - 1) < _UNEQUAL:
        return "as predicted:"
    return f"{ratio:.2f} times the predicted"


def _windows(count: int) -> str:
    return f"{count:,} window{'s' * (count != 1)}"
