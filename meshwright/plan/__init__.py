"""From a job and a cluster to what a step takes: memory and time by named terms, and how far that is from measurement."""
