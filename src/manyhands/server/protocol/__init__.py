"""Wire protocol of the parameter server: frames, messages, row encoding, shared arenas, handshake."""
