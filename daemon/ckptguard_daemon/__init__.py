"""The daemon: watches runs, verifies every new save in a separate process, and answers on a Unix socket."""
