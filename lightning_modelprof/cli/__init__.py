"""The commands of the command line, one file each, and their shared code.

Each command's file has ``HELP`` (one line), ``DESCRIPTION``, ``add_arguments`` and ``run``. Showing the help
imports all of them, so slow imports happen only in ``run``.
"""

COMMANDS = ("run", "report", "open", "list", "compare", "analyze", "tensorboard", "loader", "selftest")
"""Command names, the same as their file names, in the help's order."""
