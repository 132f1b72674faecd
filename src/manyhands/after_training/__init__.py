"""After training: what is done with the weights that a run has saved."""
