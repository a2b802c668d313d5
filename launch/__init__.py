"""How it is run: command line, workers, experiments and records."""
