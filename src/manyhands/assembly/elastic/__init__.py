"""A run whose workers may die and be replaced: leases of steps, and what a new process needs."""
