"""The version of the package; records on storage have a format version of their own."""

__version__ = "0.1.0"
