"""`python -m heterps` is `heterps`."""

import sys

from heterps.cli import main

sys.exit(main())
