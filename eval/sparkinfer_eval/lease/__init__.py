"""Holding one inference server for many workflow jobs, so that nothing outlives the workflow.

A job asks for a server (`client.acquire`); the same one is handed out again until a job needs another. The server runs
under a watchdog in a session of its own, which holds a pidfd on the workflow's process: when that process is gone, for
whatever reason, the watchdog kills the server and everything it started.
"""
