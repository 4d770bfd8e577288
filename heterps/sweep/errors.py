"""What can go wrong with a sweep."""

from heterps.errors import HeterpsError


class SweepError(HeterpsError):
    """A sweep that cannot begin or go on; what its trials came to is in the study."""
