"""Alembic's entry: run the steps on the connection, and in the transaction, that `migrate` opened."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
