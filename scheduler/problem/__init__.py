"""The question: workload, resources, demands, costs."""
