"""What is partitioned: configurations, blocks, the three architectures and their costs in closed form."""
