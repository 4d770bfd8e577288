"""The end of a step: gradients summed, judged and applied to the weights."""
