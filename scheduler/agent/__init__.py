"""The PPO agent."""
