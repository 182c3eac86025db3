"""``python -m tokenbytoken COMMAND``, installed as ``tokenbytoken COMMAND``; each command is a file of ``commands/``.

A command's file has ``NAME``, ``HELP``, ``add_arguments(parser)`` and ``run(arguments) -> int``, which raises
ValueError for bad input. It is imported when it is asked for, so that ``size`` needs no torch and nobody waits for
what another command needs.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

#: The file of each command.
COMMANDS = {"generate": "writing", "size": "sizing", "calibrate": "calibrating", "measure": "measuring"}


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. Bad input is one line on stderr and 2."""
    whole_process = argv is None
    argv = sys.argv[1:] if argv is None else argv
    named = [name for name in COMMANDS if name in argv[:1]]
    commands = [import_module(f".commands.{COMMANDS[name]}", __package__) for name in named or COMMANDS]
    parser = _Parser(prog="tokenbytoken", description="Language models: let one write, size one, calibrate a machine.")
    subparsers = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for command in commands:
        sentence = f"{command.HELP[0].upper()}{command.HELP[1:]}."
        own = subparsers.add_parser(command.NAME, help=command.HELP, description=sentence)
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except ValueError as error:
        print(f"tokenbytoken {arguments.command}: {error}", file=sys.stderr)
        return 2
    if whole_process:
        gc.freeze()  # a process that ends need not look through its libraries for garbage: that takes half a second
    return status


if __name__ == "__main__":
    raise SystemExit(main())
