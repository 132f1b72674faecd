"""Protocol of the parameter server: frames, messages, handshake, row encoding, arenas."""
