"""Other tools that call this one: a file for each, which imports that tool. Nothing here imports these files.

docs/integrations.md lists what works with which versions.
"""
