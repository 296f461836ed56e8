"""`python -m meshwright`: the command line from PYTHONPATH alone, where nothing can be installed."""

from meshwright.cli import main

main()
