"""Pipeline parallelism: stages, their executor, and the messages between them."""
