"""Device-free bookkeeping: requests, KV blocks, state slots, prefix index, policies and the scheduler.

Nothing here imports torch: the whole package runs, and is tested, on any machine.
"""
