"""The Python API: the verbs that `ckptguard` itself offers, in plain functions over the rooms below."""
