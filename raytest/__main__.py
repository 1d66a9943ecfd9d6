"""``python -m raytest``: the command line where no entry point is installed."""

from raytest.cli import main

main()
