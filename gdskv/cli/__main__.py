"""``python -m gdskv.cli``: the ``gdskv`` command without an installed script."""

from gdskv.cli.app import main

main()
