"""What a reader sees: checks, tables, plots."""
