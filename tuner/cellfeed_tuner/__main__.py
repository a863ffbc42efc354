"""``python -m cellfeed_tuner``: the ``autotune`` command."""

from cellfeed_tuner._commands import main

main()
