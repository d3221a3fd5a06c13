"""A model over several servers, one version of it at all of them: a wing that no other room imports.

pyps.remote.site finds it by its name when a server starts, or when an address names several servers.
"""
