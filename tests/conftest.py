"""What holds for all tests."""

import os

# Several test processes, each with a thread of OpenMP for every core, would mostly spin: half the
# time of the tests on two cores. Set before anything loads OpenMP; children inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
