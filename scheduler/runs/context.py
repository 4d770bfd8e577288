"""What an attempt works with."""

from dataclasses import dataclass

from scheduler.runs.calls import Channels
from scheduler.state.jobs import Jobs
from scheduler.state.leadership import Leadership
from scheduler.state.nodes import Nodes
from scheduler.state.store import Store


@dataclass(frozen=True, slots=True)
class Context:
    """The scheduler's other parts and its address."""

    store: Store
    jobs: Jobs
    nodes: Nodes
    channels: Channels
    address: str
    leadership: Leadership
