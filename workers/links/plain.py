"""Whether collectives of torch's, which encrypt nothing, may cross the network."""

import os

PLAIN = "HETERPS_PLAIN_COLLECTIVES"


def plain_allowed() -> bool:
    """Whether whoever runs this node lets sums cross the network unencrypted."""
    return os.environ.get(PLAIN) == "1"
