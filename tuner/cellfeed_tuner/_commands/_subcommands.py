"""A command that takes paths, and has subcommands as well."""

from typing import Any

import click

from cellfeed.console import OneLineErrorCommand

__all__ = ["CommandWithSubcommands"]


class CommandWithSubcommands(OneLineErrorCommand):
    """A command whose first word is a subcommand if it is the name of one.

    Otherwise its own arguments begin there. What has the name of a subcommand and is a path is
    written as ``./show``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._subcommands: dict[str, click.Command] = {}

    def add_command(self, command: click.Command) -> None:
        """Add a subcommand under its name."""
        assert command.name is not None, "a command is added by its name"  # noqa: S101
        self._subcommands[command.name] = command

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Read the arguments, for the subcommand that they begin with if they do."""
        subcommand = self._subcommands.get(args[0]) if args else None
        if subcommand is None:
            return super().make_context(info_name, args, parent, **extra)
        name = f"{info_name} {subcommand.name}"
        return subcommand.make_context(name, args[1:], parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run what the context was made for."""
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands below the options."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str()) for name, each in self._subcommands.items()]
            )
        super().format_epilog(ctx, formatter)
