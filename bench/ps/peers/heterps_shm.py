"""HeterPS as it runs on one host: rows lie in shared memory, a Unix socket carries the messages.

Measures and leaves out what `heterps` does, but that a pull looks up repeated keys as they come. It
is what a client does by default where it shares a host with the shards. Of the systems beside it
PyTorch RPC has such a way too, which is switched off here: over TCP they are compared as they would
be between machines, which `heterps` is as well.
"""

from bench.ps.peers.client import run
from bench.ps.peers.heterps import HeterPS


class HeterPSSharedMemory(HeterPS):
    """One client, `LocalShards`, shared memory."""

    shared_memory = True


if __name__ == "__main__":
    run(HeterPSSharedMemory)
