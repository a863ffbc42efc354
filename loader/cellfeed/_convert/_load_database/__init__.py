"""Writing a collection into a database: in parts, each in one transaction, by several processes.

``_job`` describes the job as a value; ``_tables`` creates and finishes the tables; ``_part`` writes
one part, in any process.
"""

from cellfeed._convert._load_database._load import Loaded, load_database
