"""The version of the package. Records on storage have their own format version."""

__version__ = "0.2.0"
