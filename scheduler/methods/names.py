"""The names of the planning methods, for option lists and job files: imports nothing.

`auto` and `best` are the best of everything, `all` also shows everything side by side.
"""

from typing import Final

CHOICES: Final = ("auto", "best", "all")
# In order of preference where two come to the same cost.
SINGLE: Final = (
    "ppo",
    "exact",
    "greedy",
    "annealing",
    "genetic",
    "bayesian",
    "rl-lstm",
    "rl-rnn",
    "aibox",
    "byteps",
    "all-cpu",
    "all-gpu",
    "random",
    "brute",
)
METHODS: Final = (*SINGLE, *CHOICES)
DEFAULT: Final = "ppo"
# Those that a job may ask for: one plan is wanted, of a method that goes for a good one.
JOB_METHODS: Final = tuple(name for name in METHODS if name not in ("random", "brute", "all"))
