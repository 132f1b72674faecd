"""Client side of the parameter server: the stores that workers use."""
