"""One copy of the model with its optimizer: flat buffers, forward, backward, step. Knows no other rank."""
