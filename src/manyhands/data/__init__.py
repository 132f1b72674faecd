"""One rank's batches: data sources, batch iterators, step claims, prefetch."""
