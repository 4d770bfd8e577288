"""Which step, which micro-batch, which worker, and what becomes of a step."""
