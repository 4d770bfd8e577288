"""The mixture of experts beside others."""
