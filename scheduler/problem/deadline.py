"""When a job whose units may be taken away must go over to sure ones, to be done in time.

Let T be the deadline, and w(t) the seconds that sure units take, by their plan, for what is left
at t as of the last cut that is written: what came after it may be lost and counts as not done. So
w never grows, whatever is taken away. Going over takes at most `moving_s`, from wherever the job
is then: to another plan from a running state, or, where that is lost too, from the cut. Somebody
looks every `every_s` seconds at most, and lets the job stay at t only where

    T - t - every_s >= w(t) * margin + moving_s.                                      (stay)

Claim: where the first look finds this, and sure units are there from then on and take at most
`margin` times what their plan says, the job is done by T, whatever is taken away and whenever.

Proof: w(t) * margin + moving_s is above 0 until the job is done, so (stay) fails at a look before T
unless the job is done before. Let t be the last look at which it held and t' <= t + every_s the one
after it. Then

    T - t' >= T - t - every_s >= w(t) * margin + moving_s >= w(t') * margin + moving_s,

as w does not grow. At t' the job goes over: at t' + moving_s at the latest it trains on sure units
from the last cut or further, and needs w(t') * margin seconds at most. So it ends by T. QED.

Nothing in it depends on how often, how many at once or with what notice units are taken away; a
move that itself is struck is covered where `moving_s` allows for beginning at the cut.
"""

from dataclasses import dataclass
from typing import Final

MARGIN: Final = 1.1  # what a pace that was planned may be missed by


@dataclass(frozen=True, slots=True)
class Deadline:
    """The rule for one job.

    Attributes:
        at: when it must be done, in seconds of any clock.
        moving_s: seconds that going over to sure units takes at most, a struck attempt included.
        every_s: seconds between two looks at most.
        margin: how many times longer the rest may take than planned.
    """

    at: float
    moving_s: float
    every_s: float = 1.0
    margin: float = MARGIN

    def may_stay(self, now: float, work_s: float) -> bool:
        """Whether it may go on with units that may be taken away until the next look.

        Args:
            work_s: seconds that sure units take, by their plan, for what the last cut lacks.
        """
        return self.at - now - self.every_s >= work_s * self.margin + self.moving_s
