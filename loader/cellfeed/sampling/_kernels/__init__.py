"""What is compiled: the permutation of blocks, and blocks that begin where chunks do.

Every function that is compiled is in this folder, which takes nothing that is compiled from
elsewhere. Each module is imported by whoever needs it, as that loads what is compiled in it.
"""
