"""docs/reference/conditions-and-events.md has every reason that the code can give, and no other."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/conditions-and-events.md"
SOURCES = ("sessions/gristmill_sessions", "operator/gristmill_operator")
CONTRACT = ROOT / "contracts/gristmill_contracts/conditions.py"
NOT_REASONS = {
    # Kinds of the API, and words of its own.
    "AlreadyExists", "BaseModel", "ClusterRole", "DeleteOptions", "DeletionFailed", "EndpointSlice", "ExactCount", "FailJob", "IfNotPresent",
    "LimitRange", "NetworkPolicy", "OnRootMismatch", "PersistentVolumeClaim", "PodScheduled", "RateCard", "ReadOnlyMany",
    "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod", "ResourceClaimTemplate", "ResourceQuota", "RoleBinding",
    "RuntimeDefault", "SelfSubjectAccessReview", "ServiceAccount", "TrainingSession",
    # What the kubelet, the runtime and the scheduler say of a pod: each is shown as one of ours.
    "CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "DeletionByTaintManager", "DisruptionTarget",
    "ErrImageNeverPull", "ErrImagePull", "ImageInspectError", "ImagePullBackOff", "InvalidImageName", "NodeShutdown",
    "PostStartHookError", "PreemptionByScheduler", "RegistryUnavailable", "RunContainerError", "SignatureValidationFailed",
    "TerminationByKubelet",
}  # fmt: skip


def words(folder: Path) -> set[str]:
    """Every string constant of the code below a folder."""
    return {
        node.value
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def said() -> set[str]:
    return {word for source in SOURCES for word in words(ROOT / source)}


def documented() -> set[str]:
    """Reasons in the first column of the tables with four columns."""
    rows = re.findall(r"^\| `(\w+)` \|[^|]+\|[^|]+\|[^|]+\|$", PAGE.read_text(), re.MULTILINE)
    return set(rows)


def test_every_reason_of_the_code_is_on_the_page() -> None:
    compound = {word for word in said() if re.fullmatch(r"[A-Z][a-z]+([A-Z][a-z]+)+", word)}
    assert len(compound) > 80
    conditions = set(re.findall(r'"([A-Z]\w+)"', CONTRACT.read_text()))
    assert compound - documented() - NOT_REASONS - conditions == set()


def test_every_reason_on_the_page_is_in_the_code() -> None:
    assert len(documented()) > 100
    known = said() | set(re.findall(r'"([A-Z]\w+)"', CONTRACT.read_text()))
    assert documented() - known == set()


def test_what_is_left_out_is_in_the_code() -> None:
    assert NOT_REASONS - said() == set()


def test_every_condition_of_a_session_is_explained() -> None:
    text = PAGE.read_text().partition("## Before it starts")[0]
    types = re.findall(r'^([A-Z_]+): Final = "(\w+)"', CONTRACT.read_text(), re.MULTILINE)
    resources = {
        "NamespaceReady", "NetworkReady", "QuotaReady", "BudgetAvailable", "WeightsAvailable", "DevicesOffered", "Recorded",
    }  # fmt: skip
    assert {name for _, name in types if name not in resources and f"`{name}`" not in text} == set()


def test_every_row_says_what_to_do() -> None:
    rows = re.findall(r"^\| `\w+` \|([^|]+)\|([^|]+)\|([^|]+)\|$", PAGE.read_text(), re.MULTILINE)
    assert all(cell.strip() for row in rows for cell in row)
