"""``python -m shadowserve_tools``: the command, where the script is not on the path."""

from shadowserve_tools import main

main(prog_name="shadowserve")
