"""Who starts whom: environment variables, processes, signals. Knows no tensors."""
