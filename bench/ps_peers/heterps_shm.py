"""HeterPS as it runs on one host: rows pass through shared memory, gRPC carries offsets.

Measures and leaves out what `heterps` does; no system beside it has such a way, so no target
goes by it.
"""

from bench.ps_peers.client import run
from bench.ps_peers.heterps import HeterPS


class HeterPSSharedMemory(HeterPS):
    """One client, `LocalShards`, shared memory."""

    shared_memory = True


if __name__ == "__main__":
    run(HeterPSSharedMemory)
