"""``python -m tilth``: the command, for launchers that start modules (torchrun -m)."""

from tilth.cli.main import main

main()
