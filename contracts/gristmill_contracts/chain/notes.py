"""Signed heads of a chain: the checkpoint format of transparency logs, signed with Ed25519.

A note (C2SP signed-note and tlog-checkpoint) reads

    <origin>
    <rows>
    <base64 of the last row's hash>
    at <UTC microseconds>

    — <key name> <base64 of key id and signature>

The origin is `<key name>/<tenant>`: one key signs the heads of all tenants. The hash is the chain's, no
Merkle root: whoever holds a note and the rows computes it again. A verifier key is one line of text,
`<key name>+<key id>+<base64>`, that a witness of such logs reads too.
"""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from gristmill_contracts.chain.encoding import HASH_BYTES
from gristmill_contracts.errors import InvalidRequestError

ALGORITHM: Final = b"\x01"
"""Ed25519, in key ids and verifier keys of signed notes."""
KEY_ID_BYTES: Final = 4
PUBLIC_KEY_BYTES: Final = 32
DASH: Final = "\N{EM DASH}"
NOTE_CHARS_MAX: Final = 4096


class ForgedHeadError(InvalidRequestError):
    """A head whose signature is not that of the key, or that is no signed head at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedHead:
    """What a note says. Only `open_note` makes one, once the signature is checked."""

    tenant: str
    seq: int
    hash: bytes
    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierKey:
    """The public half of the key that signs heads."""

    name: str
    public: bytes

    @property
    def key_id(self) -> bytes:
        named = self.name.encode() + b"\n" + ALGORITHM + self.public
        return hashlib.sha256(named).digest()[:KEY_ID_BYTES]

    def __str__(self) -> str:
        body = base64.b64encode(ALGORITHM + self.public).decode()
        return f"{self.name}+{self.key_id.hex()}+{body}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `str(key)` back. Raises InvalidRequestError."""
        name, _, rest = text.strip().partition("+")
        try:
            decoded = base64.b64decode(rest.partition("+")[2], validate=True)
        except binascii.Error:
            decoded = b""
        key = cls(name=name, public=decoded[1:])
        if not name or len(decoded) != 1 + PUBLIC_KEY_BYTES or str(key) != text.strip():
            raise InvalidRequestError(
                f"{text[:80]!r} is no verifier key of the form <name>+<key id>+<base64>; take the line "
                "that `gristmill verify --show-key` prints"
            )
        return key


def parse_keys(text: str) -> list[VerifierKey]:
    """Verifier keys with white space between, each once and in this order. Raises InvalidRequestError."""
    return list(dict.fromkeys(map(VerifierKey.parse, text.split())))


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningKey:
    """The key of a ledger. Its name is part of every note."""

    name: str
    private: Ed25519PrivateKey

    @property
    def verifier(self) -> VerifierKey:
        raw = self.private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return VerifierKey(name=self.name, public=raw)

    def sign(self, head: SignedHead) -> str:
        """The note of a head."""
        text = _text(self.name, head)
        signature = self.private.sign(text.encode())
        signed = base64.b64encode(self.verifier.key_id + signature).decode()
        return f"{text}\n{DASH} {self.name} {signed}\n"


def new_key_pem() -> bytes:
    """A fresh private key, as `openssl genpkey -algorithm ed25519` writes it."""
    return Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )


def read_key_pem(pem: bytes, name: str) -> SigningKey:
    """Raises ValueError for what is no Ed25519 key, or for a name that a note cannot hold."""
    if not name or "+" in name or any(mark.isspace() for mark in name):
        raise ValueError(
            f"the chain's name {name!r} is empty or holds a space or a plus; change it"
        )
    key = load_pem_private_key(pem, password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(  # noqa: TRY004 - it is the file that is wrong
            "the chain key is no Ed25519 key; make one: openssl genpkey -algorithm ed25519"
        )
    return SigningKey(name=name, private=key)


def open_note(note: str, keys: Sequence[VerifierKey]) -> SignedHead:
    """The head that a note tells, once one of the keys is found to have signed it.

    Raises ForgedHeadError.
    """
    text, separator, signatures = note.partition("\n\n")
    text += "\n"
    if not separator or len(note) > NOTE_CHARS_MAX:
        raise ForgedHeadError("the head is no signed note; take it from the ledger again")
    if not signatures.endswith("\n"):
        raise ForgedHeadError("the head's signature has no end; take it from the ledger again")
    for line in signatures.removesuffix("\n").split("\n"):
        for key in keys:
            if _signed_by(text, line, key):
                return _read(text, key)
    known = ", ".join(f"{key.name}+{key.key_id.hex()}" for key in keys) or "none"
    raise ForgedHeadError(
        f"the head {text.splitlines()[:2]} is signed by none of the keys given ({known}); it is forged "
        "or changed, or of another ledger"
    )


def _signed_by(text: str, line: str, key: VerifierKey) -> bool:
    parts = line.split(" ")
    if len(parts) != 3 or parts[:2] != [DASH, key.name]:
        return False
    try:
        decoded = base64.b64decode(parts[2], validate=True)
        # One signature has one spelling: the last digit of base64 holds bits that mean nothing.
        if decoded[:KEY_ID_BYTES] != key.key_id or base64.b64encode(decoded) != parts[2].encode():
            return False
        public = Ed25519PublicKey.from_public_bytes(key.public)
        public.verify(decoded[KEY_ID_BYTES:], text.encode())
    except (binascii.Error, ValueError, InvalidSignature):
        return False
    return True


def _text(name: str, head: SignedHead) -> str:
    encoded = base64.b64encode(head.hash).decode()
    return f"{name}/{head.tenant}\n{head.seq}\n{encoded}\nat {head.at_us}\n"


def _read(text: str, key: VerifierKey) -> SignedHead:
    try:
        origin, seq, encoded, at = text.splitlines()
        name, _, tenant = origin.partition("/")
        digest = base64.b64decode(encoded, validate=True)
        head = SignedHead(
            tenant=tenant, seq=int(seq), hash=digest, at_us=int(at.removeprefix("at "))
        )
    except ValueError as error:
        raise ForgedHeadError(
            f"the head {text[:200]!r} is signed, but no head of a chain"
        ) from error
    # Whatever reads in two ways is refused.
    if name != key.name or not tenant or len(digest) != HASH_BYTES or _text(name, head) != text:
        raise ForgedHeadError(f"the head {text[:200]!r} is signed, but no head of a chain")
    return head
