"""What every table of the ledger is made of."""

from sqlalchemy import BigInteger, Integer, MetaData

INT64 = BigInteger().with_variant(Integer(), "sqlite")

metadata = MetaData()
