"""Stopping in time: block_stop ends blocks of local steps early, grace says who was too late."""
