"""`python -m heterps`."""

from heterps.cli import main

main()
