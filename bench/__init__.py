"""The asv suite: how fast, how much memory, how well mixed. Lower is better throughout.

``make bench`` runs every benchmark once in the environment at hand. ``asv run``, ``asv continuous
main HEAD`` and ``asv publish`` build an environment of their own with the versions that
``asv.conf.json`` pins; on Linux, ``PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu``
makes it a small one.
"""
