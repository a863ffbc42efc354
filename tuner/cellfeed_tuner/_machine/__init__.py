"""What runs the loader: processor, memory, storage, and the page cache between."""
