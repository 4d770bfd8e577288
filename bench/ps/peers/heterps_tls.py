"""HeterPS between hosts of a cluster: TLS 1.3 with its certificate, and its token.

Measures and leaves out what `heterps` does.
"""

from bench.ps.peers.client import run
from bench.ps.peers.heterps import HeterPS


class HeterPSTls(HeterPS):
    """One client, `LocalShards`, in an environment that names certificates."""


if __name__ == "__main__":
    run(HeterPSTls)
