"""Forms of a result for all front ends: the JSON documents that scripts rely on, and lines for people.

`cli/DOCUMENTS.md` and `daemon/README.md` show one example of each. A test compares them key by key.
"""
