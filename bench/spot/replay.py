"""A job under a trace: what it pays and when it is done, by each of several rules.

Work is counted in hours of the spot plan; time runs from event to event. A unit that is taken away
has all others wait; the bill goes on for them. In a gap nothing trains and only the units that
stay are paid. Units are there again at once where the type is on offer.
"""

from dataclasses import dataclass, replace

from bench.spot.traces import Trace
from scheduler.problem.deadline import Deadline


@dataclass(frozen=True)
class Job:
    """A job, its spot plan and the plan of units that stay.

    Attributes:
        samples: in all.
        rate, sure_rate: samples/s of the two plans while they train.
        least_rate: of units that stay, no faster than the deadline asks.
        price, sure_price, least_price: dollars an hour of them; `waiting_price` of what stays in
            a gap.
        stages: units of the spot plan's stages on spot units.
        replaced_s: for a unit whose stage has others; `restarted_s` for all of a stage, without
            the work since the cut.
        cut_s: seconds between cuts.
    """

    samples: float
    hours: float
    rate: float
    price: float
    waiting_price: float
    sure_rate: float
    sure_price: float
    least_rate: float
    least_price: float
    stages: tuple[int, ...]
    replaced_s: float
    restarted_s: float
    cut_s: float
    moving_s: float


@dataclass(frozen=True)
class Outcome:
    """What came of it: hours until it was done, dollars, and how it went.

    `spot_samples` were trained for `spot_paid` dollars on spot units, gaps left out.
    """

    hours: float
    paid: float
    interruptions: int
    gaps: int
    went_over: bool
    spot_samples: float
    spot_paid: float


class _Run:
    """A run under way: time in hours, samples done and as of the last cut."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.now = self.paid = self.done = self.cut = 0.0
        self.spot_paid = self.spot_samples = self.since_cut = 0.0
        self.interruptions = self.gaps = 0

    def train(self, hours: float) -> float:
        """Train for so long, or until it is done; hours that it took."""
        job = self.job
        took = min(hours, (job.samples - self.done) / job.rate / 3600)
        self.now += took
        self.paid += took * job.price
        self.spot_paid += took * job.price
        self.done += took * 3600 * job.rate
        self.spot_samples += took * 3600 * job.rate
        self.since_cut += took * 3600
        if self.since_cut >= job.cut_s:
            left = self.since_cut % job.cut_s
            self.cut, self.since_cut = self.done - left * job.rate, left
        return took

    def stand(self, hours: float, price: float) -> None:
        """Wait, with so many dollars an hour to pay."""
        self.now += hours
        self.paid += hours * price
        if price == self.job.price:
            self.spot_paid += hours * price

    def lose(self) -> None:
        """Back to the last cut."""
        self.spot_samples -= self.done - self.cut
        self.done, self.since_cut = self.cut, 0.0

    def finish_sure(self, moving_s: float) -> Outcome:
        """On units that stay until it is done, from the cut: the worst moment to go over."""
        went_over = self.done < self.job.samples * (1 - 1e-12)
        if went_over:
            hours = moving_s / 3600 + (self.job.samples - self.cut) / self.job.sure_rate / 3600
            self.now += hours
            self.paid += hours * self.job.sure_price
        return Outcome(
            self.now, self.paid, self.interruptions, self.gaps, went_over, self.spot_samples,
            self.spot_paid,
        )  # fmt: skip


def guarded(job: Job, trace: Trace) -> Outcome:
    """Spot units while they are on offer, until the guard has it go over to those that stay."""
    run = _Run(job)
    deadline = Deadline(job.hours * 3600, job.moving_s, every_s=2.0)
    for at, end, lost in _spans(trace):
        if run.now < at:  # a gap
            run.gaps += 1
            if _until_guard(run, deadline, at, job.waiting_price):
                return run.finish_sure(job.moving_s)
        if _until_guard(run, deadline, end):
            return run.finish_sure(job.moving_s)
        if run.done >= job.samples * (1 - 1e-12):
            break
        if _until_guard(run, deadline, run.now + _strike(run, lost) / 3600, job.price):
            return run.finish_sure(job.moving_s)
    return run.finish_sure(job.moving_s)


def unmoved(job: Job, trace: Trace, restart_s: float) -> Outcome:
    """Another attempt after each interruption; with what is alive: units that stay after a gap.

    Nothing watches the deadline, and nothing comes back to spot units.
    """
    run = _Run(replace(job, sure_rate=job.least_rate, sure_price=job.least_price))
    for at, end, _ in _spans(trace):
        if run.now < at:
            run.gaps += 1
            return run.finish_sure(restart_s)
        run.train(max(0.0, end - run.now))
        if run.done >= job.samples * (1 - 1e-12):
            break
        run.interruptions += 1
        run.lose()
        run.stand(restart_s / 3600, job.price)
    return run.finish_sure(restart_s)


def omniscient(job: Job, trace: Trace) -> float:
    """Dollars that no rule with these plans is below: free moves at the best times, nothing lost.

    The most that is on offer until the deadline goes to spot units, and the rest to the cheapest of
    those that stay, at whatever pace.
    """
    total = job.samples / 3600
    a_sample = min(job.sure_price / job.sure_rate, job.least_price / job.least_rate)
    hours = min(trace.available(job.hours), total / job.rate)
    return min(total * a_sample, hours * job.price + (total - hours * job.rate) * a_sample)


def _spans(trace: Trace) -> list[tuple[float, float, int]]:
    """Time on offer between interruptions: from, to, units lost at its end."""
    spans: list[tuple[float, float, int]] = []
    events = list(trace.taken)
    for start, end in trace.up:
        at = start
        while events and events[0][0] < end:
            when, lost = events.pop(0)
            spans.append((at, when, lost))
            at = when
        spans.append((at, end, trace.units))
    return spans


def _until_guard(
    run: _Run, deadline: Deadline, until: float, standing: float | None = None
) -> bool:
    """Train until then, or stand for so many dollars an hour; whether the guard ends it before."""
    job = run.job
    step = deadline.every_s / 2 / 3600
    while run.now < until and run.done < job.samples * (1 - 1e-12):
        left = (job.samples - run.cut) / job.sure_rate
        spare = deadline.at - run.now * 3600 - left * deadline.margin - job.moving_s
        if not deadline.may_stay(run.now * 3600, left):
            return True
        # Without a cut the spare time falls by a second a second, so nothing can happen before.
        ahead = max(step, (spare - deadline.every_s) / 3600)
        ahead = min(ahead, until - run.now)
        if standing is None:
            ahead = min(ahead, max(step, (job.cut_s - run.since_cut) / 3600))
            run.train(ahead)
        else:
            run.stand(ahead, standing)
    return False


def _strike(run: _Run, lost: int) -> float:
    """Units are taken away, of stages with others or all of one stage; seconds that all wait."""
    job = run.job
    run.interruptions += 1
    if lost >= min(job.stages):
        run.lose()
        return job.restarted_s
    return job.replaced_s
