"""How results are said: the JSON documents that scripts rely on, and lines for people, for every door.

`docs/reference/json.md` and `http.md` show one example of each; a test compares them key by key.
"""
