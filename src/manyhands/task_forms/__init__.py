"""Forms in which a task is given: checked when it is made, before anything runs."""
