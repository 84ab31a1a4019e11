"""``python -m shadowserve.cli``: the command, where the script is not on the path."""

from shadowserve.cli import main

main(prog_name="shadowserve")
