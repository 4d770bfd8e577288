"""How the shipped policy is trained: random workloads, a warm start, PPO. Needs torch."""
