"""Giving a checkpoint its verdict: scan, compare with what was sealed, judge, record."""
