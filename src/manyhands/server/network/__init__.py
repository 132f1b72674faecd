"""Network side of a server: listener, request loops of shards, registration, TLS."""
