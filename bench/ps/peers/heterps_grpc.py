"""HeterPS where nothing but its gRPC ports can be reached, or traces are on.

Measures and leaves out what `heterps` does, whose pulls and pushes go by streams.
"""

from bench.ps.peers.client import run
from bench.ps.peers.heterps import HeterPS


class HeterPSGrpc(HeterPS):
    """One client, `LocalShards`, gRPC alone."""

    streams = False


if __name__ == "__main__":
    run(HeterPSGrpc)
