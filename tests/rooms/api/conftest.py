"""The Python API beside the command line, over small real runs."""

from support.commands import document, flip, invoke, process, root, three, verified  # noqa: F401 - fixtures
