"""Support of the tests: models, replicas, servers and commands that several test files share."""
