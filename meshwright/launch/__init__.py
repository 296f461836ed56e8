"""Starting runs (one process, ranks under torch's agent, several machines, Slurm), watching and restarting them."""
