"""Assembly: from a task and a plan to one rank's trainer. The composition root: it may import every room."""
