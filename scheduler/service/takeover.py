"""Telling the nodes who leads now, before anything else is asked of them."""

import logging
from concurrent.futures import ThreadPoolExecutor

from protos.node_pb2 import FollowRequest
from protos.scheduler_pb2 import NodeStatus
from scheduler.runs.calls import CallError, Channels, call
from scheduler.state.nodes import NODE, Nodes
from scheduler.state.store import Store, StoreError

_TIMEOUT_S = 3.0
_PARALLEL = 16
_ANY = ("0.0.0.0", "[::]", "::", "")
_log = logging.getLogger("heterps.takeover")


def gather(store: Store, nodes: Nodes, channels: Channels, address: str) -> None:
    """Make every node of before obey this scheduler and report to `address`.

    From a node's answer on, no scheduler before this one can start anything there. A node that
    does not answer is not waited for; if it lives, it learns the term from its next heartbeat.
    """
    try:
        before = [status for status, _ in store.known_nodes() if status.kind == NODE]
    except StoreError as error:
        _log.warning("%s", error)
        return
    # Where it listens on all addresses, only those that were told one can say which is good.
    named = address.rpartition(":")[0] not in _ANY
    request = FollowRequest(term=store.term, scheduler=address if named else "")

    def tell(node: NodeStatus) -> None:
        try:
            answer: NodeStatus = call(
                channels.node(node.address).Follow,
                request,
                what=f"node {node.node_id} at {node.address}: follow this scheduler",
                timeout_s=_TIMEOUT_S,
                stop=lambda: False,
            )
        except CallError as error:
            _log.warning("%s", error)
            nodes.unreachable(node.node_id)
            return
        if answer.node_id == node.node_id:  # its address may be another's by now
            nodes.renew(answer)
        else:
            nodes.unreachable(node.node_id)

    if before:
        with ThreadPoolExecutor(_PARALLEL) as pool:
            list(pool.map(tell, before))
