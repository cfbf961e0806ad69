"""What validation must know of a session."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFacts:
    """model: the base model's name. vocabulary_size and context_length in tokens; 0 = not known.

    location: folder of the session's checkpoints, relative to the artifact store's root.
    """

    model: str
    vocabulary_size: int
    context_length: int
    location: str
