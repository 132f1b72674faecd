"""What to run: from words to a plan."""
