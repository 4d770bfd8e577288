"""The PPO agent: plans drawn from the shipped policy, pace by pace."""
