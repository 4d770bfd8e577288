"""What a run works with."""

from dataclasses import dataclass

from scheduler.runs.calls import Channels
from scheduler.state.charge import Charge
from scheduler.state.jobs import Jobs
from scheduler.state.nodes import Nodes
from scheduler.state.store import Store


@dataclass(frozen=True, slots=True)
class Control:
    """The scheduler's other parts and its address."""

    store: Store
    jobs: Jobs
    nodes: Nodes
    channels: Channels
    address: str
    charge: Charge
