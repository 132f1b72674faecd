"""What the server from which tests fork their ranks has loaded, so that no rank loads it again: the first test to fork starts it."""

PRELOAD = [
    "torch",
    "torch.distributed",
    "numpy",
    "manyhands",
    "manyhands.parallel.trace.program",
    "torch.fx.experimental.validator",
]
