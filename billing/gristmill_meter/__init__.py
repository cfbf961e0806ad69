"""The meter: the operation log of each session, the only door to the worker, and the source of usage.

Reading order = the order of one operation: `app` reads the request, `session` decides and logs the INTENT,
`trainer` or `sampler` runs it at the worker and logs the RESULT, `session` releases it to the poll,
`poster` ships its usage to the ledger. `frames`, `records`, `state`, `decisions` and `views` are pure.
"""
