"""The audit format: how the rows of a tenant are chained, how heads are signed, how both are exported.

Shared by the ledger, which writes it, and by whoever verifies it without trusting the ledger.
"""
