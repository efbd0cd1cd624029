"""The most memory a process has had, for scripts that tests run in processes of their own."""

# `peak()` in bytes. Not `ru_maxrss`: a process begins with its parent's, however large that is.
PEAK = """
import pathlib, re, resource

def peak():
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
"""
