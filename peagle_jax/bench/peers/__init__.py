"""Programs that run other engines, each in a process of its own and perhaps another Python.

They import nothing of this package. See `peer_process` for what they read and write.
"""
