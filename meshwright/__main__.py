"""`python -m meshwright`: the command line from a bare PYTHONPATH, where nothing can be installed."""

from meshwright.cli import main

main()
