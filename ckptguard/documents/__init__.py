"""How results are said: the JSON documents that scripts rely on, and lines for people, for every door.

`cli/DOCUMENTS.md` and `daemon/README.md` show one example of each; a test compares them key by key.
"""
