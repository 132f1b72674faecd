"""Workers that may die and be replaced: which steps they hold, and what they agree on."""
