"""What outlives a scheduler, kept in Redis: jobs, queue, nodes, terms, history."""
