"""Resharding: from one layout's tensors to another's, for checkpoints and exports."""
