"""What ``python -m tokenbytoken`` can do: a file for each command, with its name, help, arguments and run."""
