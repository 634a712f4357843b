"""What the command line does: one file per command, and what they share.

A command's file has its ``HELP`` (a line), its ``DESCRIPTION``, ``add_arguments`` and ``run``. All of them
are imported to show the help, so they import what takes time only when they run.
"""

COMMANDS = ("run", "report", "open", "list", "compare", "analyze", "tensorboard", "loader")
"""Names of the commands, which are those of their files, in the order of the help."""
