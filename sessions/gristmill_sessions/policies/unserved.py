"""What a session may ask for and does not get yet: it is refused, never passed over. Pure."""

from typing import Final

from gristmill_contracts.session import TrainingSessionSpec

EVERY_LAYER: Final = frozenset({"all-linear"})


def unserved(spec: TrainingSessionSpec) -> str:
    """Which field asks for it, and the remedy; "" = all of it is served. What never changes needs a new session."""
    asked = [
        (
            not set(spec.lora.targets) <= EVERY_LAYER,
            f"spec.lora.targets is [{', '.join(sorted(spec.lora.targets))}], and every linear layer gets an adapter so "
            "far; leave it out",
        ),
        (
            spec.storage.durability == "Ledger",
            "spec.storage.durability Ledger is not served yet; leave it out, and choose a storageClassName whose "
            "volumes outlive their node",
        ),
        (
            spec.encryption.key_ref != "",
            f"spec.encryption.keyRef is {spec.encryption.key_ref!r}, and checkpoints are not encrypted by us yet; leave it "
            "out, and let the storage class encrypt",
        ),
    ]
    return "; ".join(message for is_asked, message in asked if is_asked)
