"""What a run works with."""

from dataclasses import dataclass

from scheduler.calls import Channels
from scheduler.charge import Charge
from scheduler.jobs import Jobs
from scheduler.nodes import Nodes
from scheduler.store import Store


@dataclass(frozen=True, slots=True)
class Control:
    """The scheduler's other parts and its address."""

    store: Store
    jobs: Jobs
    nodes: Nodes
    channels: Channels
    address: str
    charge: Charge
