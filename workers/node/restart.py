"""A job's shard on its node: how it is started, and when it is started again."""

from dataclasses import dataclass
from pathlib import Path

from chassis.process import module_argv
from protos.node_pb2 import LaunchRequest

_KEPT = ("checkpoint", "log")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRule:
    """How often a shard that died is started again, and how soon.

    Attributes:
        most: restarts within the window; the next death is final.
        window_s: how long a restart counts.
        pause_s: before the second restart in the window; doubled for each after it.
        longest_s: of the pauses.
    """

    most: int = 5
    window_s: float = 600.0
    pause_s: float = 0.5
    longest_s: float = 10.0

    def pause_before(self, restarts: list[float], now: float) -> float | None:
        """Seconds to wait before the next restart; None to give up.

        Args:
            restarts: when the earlier ones were, on the clock of `now`.
            now: of the death.
        """
        recent = sum(when > now - self.window_s for when in restarts)
        if recent >= self.most:
            return None
        return min(self.longest_s, self.pause_s * 2 ** (recent - 1)) if recent else 0.0

    @property
    def exhausted(self) -> str:
        """Why there is no further restart, in words."""
        return f"was started again {self.most} times within {self.window_s / 60:g} minutes"


def keeps_rows(request: LaunchRequest) -> bool:
    """Whether a shard that dies brings its rows back when it is started again."""
    return request.job.servers.durability in _KEPT


def shard_argv(request: LaunchRequest, bind: str, directory: Path) -> list[str]:
    """The command of a shard.

    Args:
        request: to launch it.
        bind: host:port.
        directory: of this shard alone, for rows that do not fit memory and what survives it.
    """
    shards = max(request.job.servers.shards, request.index + 1)
    place = "--data" if keeps_rows(request) else "--disk"
    return module_argv(
        "ps.server",
        *("--bind", bind, "--shard", str(request.index), "--shards", str(shards)),
        *(place, str(directory)),
        *("--job", request.job_id),
    )
