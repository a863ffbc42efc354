"""Writing a copy of a collection as a zarr store, shuffled or in order, in groups as annbatch has.

``_job`` describes the job as a pure value, and records it and the finished parts in the output;
``_inputs`` opens what is copied; ``_dataset`` writes one part; ``_preshuffle`` runs it all, in this
process or on the workers of a Dask cluster, and verifies the result.
"""

from cellfeed.preshuffling._job import InputFile
from cellfeed.preshuffling._preshuffle import Preshuffled, preshuffle
from cellfeed.preshuffling._tables import ObsTable

__all__ = ["InputFile", "ObsTable", "Preshuffled", "preshuffle"]
