"""What an attempt works with."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.runs.calls import Channels
from scheduler.state.jobs import Jobs
from scheduler.state.leadership import Leadership
from scheduler.state.nodes import Nodes
from scheduler.state.store import Store


@dataclass(frozen=True, slots=True)
class Context:
    """The scheduler's other parts and its address.

    Attributes:
        job_token: the token of a job's own processes; empty where nobody is asked for one.
    """

    store: Store
    jobs: Jobs
    nodes: Nodes
    channels: Channels
    address: str
    leadership: Leadership
    job_token: Callable[[str], str] = lambda job_id: ""
