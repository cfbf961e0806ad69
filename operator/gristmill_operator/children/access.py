"""Who may do what in a tenant's namespace: the operator, the tenant's people, its client keys, its pods."""

from typing import Any, Final

from gristmill_contracts import labels
from gristmill_contracts.tenant import Subject, Tenant
from gristmill_operator.children.manifest import Manifest, tenant_labels
from gristmill_operator.children.namespace import namespace_name
from gristmill_operator.children.options import ChildOptions

RBAC: Final = "rbac.authorization.k8s.io"
OPERATOR: Final = "gristmill-operator"
VIEWERS: Final = "gristmill-viewers"
EDITORS: Final = "gristmill-editors"
Party = dict[str, str]


def operator_binding(tenant: Tenant, options: ChildOptions) -> Manifest:
    """First of all: without it the operator may write nothing in the namespace."""
    account = service_account_party(options.operator_account, options.system_namespace)
    return _binding(tenant, OPERATOR, options.tenant_role, [account])


def people_bindings(tenant: Tenant, options: ChildOptions) -> list[Manifest]:
    """One for those who read and one for those who write, client keys among them."""
    viewers = [_party(each) for each in tenant.spec.subjects if each.role == "view"]
    editors = [_party(each) for each in tenant.spec.subjects if each.role == "edit"]
    editors.append(service_account_party(labels.CLIENT_ACCOUNT, namespace_name(tenant)))
    made = [_binding(tenant, EDITORS, options.editor_role, editors)]
    if viewers:
        made.append(_binding(tenant, VIEWERS, options.viewer_role, viewers))
    return made


def accounts(tenant: Tenant) -> list[Manifest]:
    """The pods' account, bound to nothing, and that of client keys. Neither gets a token mounted."""
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {
                "name": name,
                "namespace": namespace_name(tenant),
                "labels": tenant_labels(tenant.metadata.name),
            },
            "automountServiceAccountToken": False,
        }
        for name in (labels.WORKER_ACCOUNT, labels.CLIENT_ACCOUNT)
    ]


def service_account_party(name: str, namespace: str) -> Party:
    return {"kind": "ServiceAccount", "name": name, "namespace": namespace}


def _party(subject: Subject) -> Party:
    if subject.kind == "ServiceAccount":
        return service_account_party(subject.name, subject.namespace)
    return {"kind": subject.kind, "name": subject.name, "apiGroup": RBAC}


def _binding(tenant: Tenant, name: str, role: str, parties: list[Party]) -> Manifest:
    reference: dict[str, Any] = {"apiGroup": RBAC, "kind": "ClusterRole", "name": role}  # Any: text
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": {
            "name": name,
            "namespace": namespace_name(tenant),
            "labels": tenant_labels(tenant.metadata.name),
        },
        "roleRef": reference,
        "subjects": parties,
    }
