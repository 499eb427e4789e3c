"""The `lsuv` command; the only package that prints."""

from lsuv_cli.cli.commands import app, main

__all__ = ["app", "main"]
