"""`python -m manyhands` is `manyhands`."""

from manyhands.cli import main

main()
