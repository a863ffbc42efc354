"""Writing a collection anew: shuffled, in zarr, in groups as annbatch has them.

``_job`` says what is to be done, as a pure value; ``_folder`` keeps it, and what is done of it,
in the output; ``_part`` writes one part, in any process; ``_check`` reads the result.
"""

from cellfeed._preshuffle._preshuffle import Preshuffled, preshuffle

__all__ = ["Preshuffled", "preshuffle"]
