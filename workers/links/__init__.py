"""Between workers: micro-batches from stage to stage, sums of dense gradients in a stage."""
