"""The command line: one file a verb, wired together here. Heavy imports wait until their verb is called."""

from manyhands.cli.main import main

__all__ = ["main"]
