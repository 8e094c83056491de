"""Bulk work on a fleet of runs, on any engine with the interface of `concurrent.futures.Executor`."""
