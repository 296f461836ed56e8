"""Pipeline parallelism: stages, their weights, and the runtimes that run them by a schedule."""
