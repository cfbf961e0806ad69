"""Identifies callers: SigV4 against the access keys of the store. The only way in."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from gristmill_contracts import limits
from gristmill_contracts.credentials import AccessKeySpec
from gristmill_gateway import sigv4
from gristmill_gateway.accounts import Accounts
from gristmill_gateway.caller import Caller
from gristmill_gateway.directory import Directory
from gristmill_gateway.sigv4 import Claim, SignatureError, SignedRequest

SERVICES = frozenset({"sagemaker", "s3"})


def utc_now() -> datetime:
    return datetime.now(UTC)


@lru_cache(maxsize=4096)
def _signing_key(secret: str, date: str, region: str, service: str) -> bytes:
    return sigv4.signing_key(secret, date, region, service)


@dataclass(frozen=True, slots=True, kw_only=True)
class Authenticator:
    """Two steps, so that a caller without a known key cannot make us read a large body."""

    directory: Directory
    accounts: Accounts
    clock: Callable[[], datetime] = utc_now
    clock_skew_s: float = limits.CLOCK_SKEW_S_MAX

    async def admit(
        self, request: SignedRequest, as_of: float | None = None
    ) -> tuple[Claim, AccessKeySpec]:
        """The claim and the key that it names. Nothing is proven yet. Raises SignatureError."""
        claim = sigv4.read_claim(request)
        sigv4.check_clock(claim, self.clock(), self.clock_skew_s)
        if claim.service not in SERVICES:
            raise SignatureError(
                "scope",
                "Credential should be scoped to correct service: 'sagemaker' or 's3', not "
                f"{claim.service!r}",
            )
        if request.value("x-amz-security-token") is not None:
            raise SignatureError(
                "unknown_key",
                "The security token included in the request is invalid: keys here have none; unset "
                "AWS_SESSION_TOKEN",
            )
        key = await self.directory.access_key(claim.access_key_id, as_of)
        if key is None or key.spec.revoked_us is not None:
            why = "is not known" if key is None else "was revoked"
            raise SignatureError(
                "unknown_key",
                "The security token included in the request is invalid: access key "
                f"{claim.access_key_id!r} {why}; make one with `gristmill keys create`",
            )
        return claim, key.spec

    async def prove(
        self,
        request: SignedRequest,
        claim: Claim,
        key: AccessKeySpec,
        body_sha256: str,
        as_of: float | None = None,
    ) -> Caller:
        """The caller, once the signature is right. Raises SignatureError, UnavailableError."""
        signing_key = _signing_key(key.secret_access_key, claim.date, claim.region, claim.service)
        sigv4.check_signature(request, claim, signing_key, body_sha256)
        return Caller(
            tenant=key.tenant,
            account_id=await self.accounts.account_id(key.tenant),
            region=claim.region,
            invocation_id=request.value("amz-sdk-invocation-id") or "",
            as_of=as_of,
            service_account=key.service_account,
            key=key.access_key_id,
        )
