"""Worker, meter and ledger are compared, to the token; what differs stays open until somebody decides."""
