"""Starting runs: one process, ranks under torch's agent, several machines, Slurm; what watches and restarts them."""
