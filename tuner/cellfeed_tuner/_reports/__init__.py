"""A result in words: in a terminal, as a page, as code to paste."""
