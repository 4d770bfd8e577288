"""Mixture of experts: gates, the layer, experts over processes, `moefy`."""
