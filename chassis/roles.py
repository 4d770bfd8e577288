"""Who may call what: the roles, and the one that each method of each service asks for.

| role | who has it | may |
|---|---|---|
| read | a token that was made with it | see all jobs, nodes and metrics; change nothing |
| submit | the same | submit jobs; see, cancel and fetch its own user's, and no others |
| operate | the same | all of that with the jobs of all users; see the tokens; drain nodes |
| job | the processes of one job | report for it, keep and fetch its files, use shards |
| cluster | schedulers, nodes and shards, by the token in HETERPS_TOKEN_FILE | everything |

A caller's role covers others (`Role.covers`). Whose job it is, the scheduler asks besides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

ROOT: Final = "root"  # the user of the cluster's own token


class Role(StrEnum):
    """What a caller is, and what a method asks for."""

    READ = "read"
    SUBMIT = "submit"
    OPERATE = "operate"
    JOB = "job"
    CLUSTER = "cluster"

    def covers(self, required: "Role") -> bool:
        """Whether a caller of this role may call a method that asks for `required`."""
        return required in _COVERED[self]


_COVERED: Final = {
    Role.READ: {Role.READ},
    Role.JOB: {Role.JOB},
    Role.SUBMIT: {Role.READ, Role.JOB, Role.SUBMIT},
    Role.OPERATE: {Role.READ, Role.JOB, Role.SUBMIT, Role.OPERATE},
    Role.CLUSTER: set(Role),
}
GRANTED: Final = (Role.READ, Role.SUBMIT, Role.OPERATE)  # to tokens that are made
_ALL_JOBS: Final = (Role.READ, Role.OPERATE, Role.CLUSTER)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call.

    Attributes:
        user: whose jobs are its own; empty where nobody is asked for a token.
        job_id: of a process of a job, the one that it acts for.
    """

    user: str
    role: Role
    job_id: str = ""

    def sees(self, job_id: str, user: str) -> bool:
        """Whether it may see a job that `user` submitted, and do to it what its role covers."""
        if self.role is Role.JOB:
            return (self.job_id, self.user) == (job_id, user)
        return self.sees_all or self.user == user

    @property
    def sees_all(self) -> bool:
        """Whether the jobs of all users are shown to it."""
        return self.role in _ALL_JOBS


# Of a server that asks for no token: loopback without TLS is open to its machine's processes.
ANYBODY: Final = Caller("", Role.CLUSTER)
# Health is asked by container engines that hold no token; it tells nothing but "serving".
OPEN: Final = "/grpc.health.v1.Health/Check"


def _methods(service: str, role: Role, names: str) -> dict[str, Role]:
    return {f"/{service}/{name}": role for name in names.split()}


_SCHEDULER: Final = "heterps.v1.Scheduler"
_ACCESS: Final = "heterps.v1.Access"
_SHARD: Final = "heterps.v1.ParameterServer"
# What is not here is refused to everybody.
REQUIRED: Final[Mapping[str, Role]] = MappingProxyType(
    _methods(_SCHEDULER, Role.READ, "GetJob ListJobs WatchJob Logs GetDecision ListDecisions")
    | _methods(_SCHEDULER, Role.READ, "GetReplan ListNodes")
    | _methods(_SCHEDULER, Role.SUBMIT, "Submit CancelJob MoveJob Plan")
    | _methods(_SCHEDULER, Role.OPERATE, "DrainNode")
    | _methods(_SCHEDULER, Role.JOB, "Report")
    | _methods(_SCHEDULER, Role.CLUSTER, "Heartbeat")
    | _methods("heterps.v1.History", Role.READ, "GetHistory")
    | _methods("heterps.v1.Artifacts", Role.JOB, "Has Put Get List Remove")
    | _methods(_ACCESS, Role.READ, "WhoAmI")
    | _methods(_ACCESS, Role.OPERATE, "ListTokens")
    | _methods(_ACCESS, Role.CLUSTER, "CreateToken RevokeToken")
    | _methods(
        "heterps.v1.Node", Role.CLUSTER, "Follow Profile Launch StopJob Drain ReadLog Status"
    )
    # Between the workers of a job, which ask for that job's token: see `chassis.callers`.
    | _methods("heterps.v1.Stage", Role.JOB, "Start Regroup Pause ReadState Connect Join")
    | _methods(_SHARD, Role.JOB, "Pull Push Attach Advance Stage Tally Commit Stats Keys Route")
    | _methods(_SHARD, Role.JOB, "CreateTable DropTables Shrink Cut Keep Save Load")
    | _methods(_SHARD, Role.CLUSTER, "Fetch Move Absorb Replicate")
    | _methods("grpc.health.v1.Health", Role.READ, "Watch")
    | _methods("grpc.reflection.v1alpha.ServerReflection", Role.READ, "ServerReflectionInfo")
)
