"""Forms of a result for all front ends: the JSON documents that scripts rely on, and lines for people.

`docs/reference/json.md` and `http.md` show one example of each. A test compares them key by key.
"""
