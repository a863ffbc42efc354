"""The subject of tuning: rows of a collection, or any loader; its labels and plans."""
