"""Model parallelism: one replica spread over several ranks."""
