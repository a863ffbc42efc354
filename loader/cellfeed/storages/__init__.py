"""Storages beyond AnnData: each is a folder that nothing imports, found by the registry.

A folder has one or several `cellfeed.sources.Storage` under public names. It can be deleted.
"""
