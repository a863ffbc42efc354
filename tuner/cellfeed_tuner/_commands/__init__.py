"""The command line: ``autotune`` and its subcommands."""
