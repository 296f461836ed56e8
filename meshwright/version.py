"""The package's version, alone in a file so that building and `--version` import nothing else."""

VERSION = "0.2.0"
