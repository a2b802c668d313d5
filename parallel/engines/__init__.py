"""Who partitions and runs: one file an engine."""
