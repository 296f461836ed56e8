"""The package's version, in its own file so that building and `--version` import nothing else."""

VERSION = "0.2.0"
