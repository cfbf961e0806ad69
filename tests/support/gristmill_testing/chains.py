"""Whether the chains of a ledger's usage rows are whole, by reading them all."""

from sqlalchemy import Connection

from gristmill_contracts.chain.walk import BrokenChainError, Walk
from gristmill_ledger.chain.pages import chain_heads, walk_page


def broken_chains(connection: Connection) -> list[str]:
    """The first fault of each tenant that has one."""
    faults = []
    for head in chain_heads(connection):
        walk = Walk(tenant=head.tenant)
        try:
            while walk.seq < head.seq:
                walk_page(connection, walk, head.seq)
            walk.finish([], last=(head.seq, head.hash))
        except BrokenChainError as error:
            faults.append(str(error))
    return faults
