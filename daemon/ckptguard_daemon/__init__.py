"""The daemon: watches runs, verifies every new save in a process of its own, and answers on a Unix socket."""
