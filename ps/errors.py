"""What can go wrong with tables, shards and checkpoints."""

from collections.abc import Callable

import grpc

from chassis.files import lacks_room
from protos.reason_pb2 import (
    DISK_FULL,
    HOLD_ENDED,
    MEMORY_NOT_ATTACHED,
    PARTS_MISSING,
    REASON_UNSPECIFIED,
    REPLICA_BEHIND,
    SAVE_REPLACED,
    STEP_OVER,
    WHOLE_SAVE_NEEDED,
    Reason,
)


class TableError(ValueError):
    """A table, keys or gradients that are not what the call needs.

    Attributes:
        reason: what a shard tells its caller besides the status.
    """

    reason: Reason.ValueType = REASON_UNSPECIFIED


class NonFiniteError(TableError):
    """Gradients that are not finite, which no row can take; nothing was applied."""


class NotAttachedError(TableError):
    """Shared memory that a shard does not know: it was restarted, or had too many."""

    reason = MEMORY_NOT_ATTACHED


class ConflictError(RuntimeError):
    """A request that does not go with the state of the shard that it meets.

    Attributes:
        reason: what a shard tells its caller besides the status.
    """

    reason: Reason.ValueType = REASON_UNSPECIFIED


class LacksChangesError(ConflictError):
    """A replica lacks changes of its primary's: it must have the whole state first."""

    reason = REPLICA_BEHIND


class PartsMissingError(ConflictError):
    """A step is to end of which a shard has not all parts, as after a restart without them."""

    reason = PARTS_MISSING


class StepOverError(ConflictError):
    """A step is to end otherwise than it has."""

    reason = STEP_OVER


class NoRoomError(RuntimeError):
    """A disk has no room for a change, or for a base; nothing was changed."""


class OutdatedError(RuntimeError):
    """A push so late that whether it was applied is no longer known; it was not applied now."""


class StaleRouteError(RuntimeError):
    """A request by a routing that no longer holds."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete or damaged; nothing was loaded from it.

    Attributes:
        reason: what a shard tells its caller besides the status.
    """

    reason: Reason.ValueType = REASON_UNSPECIFIED


class DeltaError(CheckpointError):
    """A delta cannot build on that save: a whole checkpoint must be saved first."""

    reason = WHOLE_SAVE_NEEDED


class ReplacedError(CheckpointError):
    """Another save lies there than the one that was begun with."""

    reason = SAVE_REPLACED


class HoldEndedError(CheckpointError):
    """Whoever held pushes back was not heard of for too long, so the shard has let them go on."""

    reason = HOLD_ENDED


class NoSpaceError(CheckpointError):
    """A disk has no room for a save; what was saved before is untouched."""

    reason = DISK_FULL


def is_disk_full(error: BaseException) -> bool:
    """Whether it says that a disk has no room, here or where a shard writes."""
    if isinstance(error, OSError):
        return lacks_room(error)
    told = isinstance(error, CheckpointError | ShardError) and error.reason == DISK_FULL
    return told or isinstance(error, NoRoomError)


def not_written(text: str, error: OSError) -> CheckpointError:
    """The error for a save that could not be written.

    Args:
        text: what is said of it.
        error: why.
    """
    return (NoSpaceError if lacks_room(error) else CheckpointError)(text)


class DamageError(CheckpointError):
    """What a shard kept of itself is damaged: it does not start with less than it acknowledged."""


class ShardError(RuntimeError):
    """A shard that did not answer, or refused.

    Attributes:
        shard: its index.
        address: its host:port.
        code: the status that came back.
        reason: why, where the status does not tell.
    """

    def __init__(
        self,
        shard: int,
        address: str,
        code: grpc.StatusCode,
        what: str,
        reason: Reason.ValueType = REASON_UNSPECIFIED,
    ) -> None:
        super().__init__(f"parameter-server shard {shard} ({address}) {what}")
        self.shard = shard
        self.address = address
        self.code = code
        self.reason = reason


class OutcomeUnknownError(ShardError):
    """A push that not every shard has answered: whether it was applied there is not known.

    A push of the same gradients would be another one, and apply them twice where this one was.
    """

    def __init__(self, error: ShardError, retry: Callable[[], None]) -> None:
        RuntimeError.__init__(
            self,
            f"{error}; whether it was applied is not known: this error's retry() sends it again, "
            "and no row takes it twice",
        )
        self.shard = error.shard
        self.address = error.address
        self.code = error.code
        self.reason = error.reason
        self._retry = retry

    def retry(self) -> None:
        """Send what was not answered again, as the push that it was; may be repeated.

        Raises:
            OutcomeUnknownError: not every shard has answered again.
            ShardError: one refused: OUT_OF_RANGE where it came too late to tell (see
                `ps.shard.exactly_once.LATE_S`), and was not applied now.
        """
        self._retry()
