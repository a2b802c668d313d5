"""How it is partitioned: mesh, communication, plans, pipeline, prediction and engines."""
