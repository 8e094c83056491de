"""The JSON documents that scripts rely on: how a result is turned into one, for the command line and the daemon.

`docs/reference/json.md` and `http.md` show one example of each; a test compares them key by key.
"""
