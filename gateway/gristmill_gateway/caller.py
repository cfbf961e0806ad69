"""An authenticated caller."""

from dataclasses import dataclass

from gristmill_gateway.sagemaker.arns import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """region: what the request was signed for. invocation_id: the same in every retry of one call.

    as_of: when the request arrived (monotonic seconds), for `directory`. service_account: whose rights
    the caller has; empty = all of the tenant's. key: id of the access key that signed (no secret).
    """

    tenant: str
    account_id: str
    region: str
    invocation_id: str = ""
    as_of: float | None = None
    service_account: str = ""
    key: str = ""

    @property
    def scope(self) -> Scope:
        return Scope(self.region, self.account_id)
