"""The raw gRPC echo over TLS: the ceiling of anything encrypted over gRPC.

Measures and leaves out what `echo` does, with the same certificate as `heterps-tls`.
"""

from bench.ps.peers.client import run
from bench.ps.peers.echo import Echo


class EchoTls(Echo):
    """One client, as many echoing servers, in an environment that names certificates."""


if __name__ == "__main__":
    run(EchoTls)
