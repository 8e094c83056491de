"""Give a checkpoint its verdict: scan, compare with the seal, judge, record."""
