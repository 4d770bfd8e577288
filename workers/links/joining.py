"""Where a worker's neighbours connect, as its stage service tells them."""

import contextlib
import socket

from chassis import port
from chassis.port import Port
from chassis.security import Security
from protos.stage_pb2 import JoinReply

NEAR = "heterps-stage"  # how the names of workers' Unix sockets begin


def reply_of(door: Port) -> JoinReply:
    """Where and how others connect to a port."""
    address = f"{door.host}:{door.number}"
    return JoinReply(address=address, secret=door.secret, name=door.name)


def reach(
    reply: JoinReply, host: str, here: str, security: Security | None = None
) -> socket.socket:
    """A connection to the port of another worker.

    Args:
        reply: what that worker answered.
        host: of it, as others call it.
        here: the same of this worker; what stays on a host takes the Unix socket.

    Raises:
        OSError: it cannot be reached.
    """
    if reply.name and host == here:
        with contextlib.suppress(OSError):  # the same name, yet another host
            return port.reach_near(reply.name, reply.secret)
    return port.reach(host, int(reply.address.rpartition(":")[2]), reply.secret, security)
