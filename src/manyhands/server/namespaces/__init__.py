"""Several runs and stores on one server, apart: whose clock, whose worker numbers, whose tables."""
