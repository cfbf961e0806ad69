"""Alembic's steps. Once released, a step is never edited."""
