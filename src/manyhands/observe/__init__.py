"""observe: WHAT HAPPENED. Every rank appends events to its own file; all text, pictures and traces are read from those."""
