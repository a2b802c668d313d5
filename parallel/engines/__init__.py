"""Who partitions and runs: one file an engine, behind the interface in `engine.py`."""
