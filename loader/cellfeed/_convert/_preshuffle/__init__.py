"""Writing a shuffled copy of a collection as a zarr store, in groups as annbatch has them.

``_job`` describes the job as a pure value; ``_folder`` records it, and the finished parts, in the
output; ``_part`` writes one part, in any process; ``_check`` verifies the result.
"""

from cellfeed._convert._preshuffle._preshuffle import Preshuffled, preshuffle
