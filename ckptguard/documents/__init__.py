"""The JSON documents that scripts rely on: how a result becomes one, for the command line and the daemon.

`cli/DOCUMENTS.md` and `daemon/README.md` show one example of each. A test compares them key by key.
"""
