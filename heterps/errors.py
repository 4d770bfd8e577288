"""What can go wrong for a user, and the exit code that tells a script so."""

from typing import Final

OK: Final = 0
JOB_FAILED: Final = 1
USAGE: Final = 2
CANCELLED: Final = 3
UNREACHABLE: Final = 4
INFEASIBLE: Final = 5
INTERRUPTED: Final = 130

EXIT_CODES: Final = """\b
Exit codes:
  0    done
  1    the job failed
  2    a wrong command line, file or key
  3    the job was cancelled
  4    no cluster answers, or it did not start
  5    no plan meets the demands
  130  interrupted with Ctrl-C"""


class HeterpsError(RuntimeError):
    """An error whose message is all that a user needs; `exit_code` is the command's."""

    exit_code: int = USAGE


class ContextError(HeterpsError):
    """A context that is unknown, or whose file cannot be used."""


class UnreachableError(HeterpsError):
    """No scheduler answers; says where it was looked for and what to type."""

    exit_code = UNREACHABLE


class TokenRefusedError(HeterpsError):
    """The scheduler knows nobody by our token: it is missing, wrong, revoked or has expired."""


class ForbiddenError(HeterpsError):
    """The token's role may not do that, or the job is another user's."""


class UnknownJobError(HeterpsError):
    """No job of this id, or several that it may stand for."""


class NoDecisionError(HeterpsError):
    """The job has not been planned, or could not be."""


class BestPlanError(HeterpsError):
    """The job has the best plan already: there is none to go over to."""


class NotMovedError(HeterpsError):
    """The job ended, and does not say whether it had gone over to another plan."""

    exit_code = JOB_FAILED


class ClusterError(HeterpsError):
    """The embedded cluster cannot be started or stopped."""

    exit_code = UNREACHABLE


class PrepareError(HeterpsError):
    """The job's `data.prepare` failed or made nothing."""


class DataMismatchError(HeterpsError):
    """The job's data has not the columns, types or values that the job needs."""


class CodeError(HeterpsError):
    """The job's code cannot be packed, or the cluster does not take it."""


class MissingCodeError(CodeError):
    """The scheduler does not have the code that the job names, or has it no longer."""


class ModelUseError(HeterpsError):
    """A model that cannot be opened, or data that does not fit it."""


class FetchError(HeterpsError):
    """What a job left behind cannot be fetched."""
