"""What docs/reference/kubectl.md shows is what kubectl says on a real cluster.

`make transcripts` runs this with GRISTMILL_WRITE_TRANSCRIPTS=1, which writes the page; a plain run compares.
Times, addresses and generated names differ from run to run: compared is what is left without them.
"""

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sagemaker.train.training_session as sdk

from gristmill_testing.chart import ROOT
from gristmill_testing.cluster import Cluster
from gristmill_testing.node_lab import PLACE, TINY, Lab, open_lab
from gristmill_testing.raw_wire import ROLE_ARN, model_arn
from gristmill_testing.release import remove_everything
from gristmill_testing.sdk_loop import TOKENS, step

PAGE = ROOT / "docs/reference/kubectl.md"
WRITE = "GRISTMILL_WRITE_TRANSCRIPTS"
FILES = {
    "session.yaml": """
apiVersion: gristmill.dev/v1alpha1
kind: TrainingSession
metadata:
  name: first-run
spec:
  baseModelRef: {name: tiny}
  lora: {rank: 8, alpha: 16}
  storage: {size: 1Gi}
""",
    "no-adapter.yaml": """
apiVersion: gristmill.dev/v1alpha1
kind: TrainingSession
metadata:
  name: no-adapter
spec:
  baseModelRef: {name: tiny}
""",
    "long-name.yaml": """
apiVersion: gristmill.dev/v1alpha1
kind: TrainingSession
metadata:
  name: a-name-that-is-much-too-long-for-a-session-of-ours
spec:
  baseModelRef: {name: tiny}
  lora: {}
""",
    "no-model.yaml": """
apiVersion: gristmill.dev/v1alpha1
kind: TrainingSession
metadata:
  name: no-model
spec:
  baseModelRef: {name: llama-9000}
  lora: {}
""",
}


@dataclass(slots=True, kw_only=True)
class Story:
    """The page as it grows: headings, words, and commands with what they said."""

    lab: Lab
    folder: Path
    parts: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.parts.append(f"{text.strip()}\n")

    def show(self, name: str) -> None:
        self.parts.append(f"`{name}`:\n\n```yaml\n{FILES[name].strip()}\n```\n")

    def run(self, command: str, *, timeout: float = 180) -> str:
        """One kubectl command, refused or not; its files lie in the story's folder."""
        words = shlex.split(command)[1:]
        places = [str(self.folder / word) if word in FILES else word for word in words]
        answer = self.lab.cluster.try_kubectl(*places, timeout=timeout)
        said = (answer.out + answer.err).replace(f"{self.folder}/", "").rstrip()
        kept = "\n".join(line.rstrip() for line in said.splitlines())
        self.parts.append(f"```console\n$ {command}\n{kept}\n```\n")
        print(self.parts[-1])
        return said


@pytest.fixture(scope="module")
def story(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    remove_everything(node_cluster)
    lab = open_lab(node_cluster, tmp_path_factory.mktemp("lab"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE"):
            patch.delenv(name, raising=False)
        for name, value in lab.environment.items():
            patch.setenv(name, value)
        folder = tmp_path_factory.mktemp("files")
        for name, text in FILES.items():
            (folder / name).write_text(text.lstrip())
        yield Story(lab=lab, folder=folder)
    remove_everything(node_cluster)


def train(lab: Lab, steps: int) -> sdk.TrainingClient:
    """Steps of the official SDK in the session that kubectl made. A client that is let go of stops its session."""
    client = sdk.ServiceClient(role_arn=ROLE_ARN).create_lora_training_client(
        model_arn(lab.environment["AWS_REGION"], TINY),
        training_session_name="first-run", rank=8, alpha=16,
    )  # fmt: skip
    for _ in range(steps):
        step(client)
    lab.expect_tokens("first-run", {"train": steps * sum(map(len, TOKENS))})
    return client


def tell(story: Story) -> None:
    """A session's life, as its user and the platform team see it."""
    place = f"-n {PLACE}"
    story.say("# What kubectl shows\n\nA session's life on a real cluster (Kubernetes 1.37, a tiny Llama, no GPU). This page is made by "
              "`make transcripts`; a test runs the commands again and compares.\n\n## What the platform team declared\n")  # fmt: skip
    story.run("kubectl get tenants,basemodels,ratecards")
    story.run(f"kubectl get networkpolicies,resourcequotas,rolebindings {place}")
    story.say("## A session\n")
    story.show("session.yaml")
    story.run(f"kubectl apply {place} -f session.yaml")
    story.run(f"kubectl wait {place} --for=condition=Ready gms/first-run --timeout=170s")
    story.say("Then the official SDK trained it for 3 steps.\n")
    client = train(story.lab, 3)
    story.run(f"kubectl get gms {place}")
    story.run(f"kubectl get gms {place} -o wide")
    story.run(f"kubectl get pods,pvc {place} -l gristmill.dev/session=first-run")
    story.run(f"kubectl describe gms first-run {place}")
    story.say("`Ready` means that a call now is accepted, `Serving` that it runs at once. What each condition and event means, "
              "and what to do, stands in [conditions and events](conditions-and-events.md).\n\n## What is refused\n")  # fmt: skip
    story.show("no-adapter.yaml")
    story.run(f"kubectl apply {place} -f no-adapter.yaml")
    story.run(f"kubectl apply {place} -f long-name.yaml")
    story.run(
        f'kubectl patch gms first-run {place} --type merge -p \'{{"spec":{{"lora":{{"rank":16}}}}}}\''
    )
    story.say(
        "## A session that cannot start\n\nIt says what it waits for, and goes on by itself when that is there.\n"
    )
    story.run(f"kubectl apply {place} -f no-model.yaml")
    story.lab.cluster.wait_condition(
        "trainingsession", "no-model", "Accepted", PLACE, status="False", seconds=15
    )
    story.run(f"kubectl get gms no-model {place} -o "
              "jsonpath='{.status.conditions[?(@.type==\"Accepted\")].reason}: {.status.conditions[?(@.type==\"Accepted\")].message}'")  # fmt: skip
    story.run(f"kubectl delete gms no-model {place}")
    story.say("## The end\n")
    story.run(
        f'kubectl patch gms first-run {place} --type merge -p \'{{"spec":{{"desiredState":"Stopped"}}}}\''
    )
    story.lab.wait_state("first-run", "Stopped")
    del client
    story.run(f"kubectl get gms {place}")
    story.run(f"kubectl delete gms first-run {place}")
    story.say(
        "The ledger keeps its usage, and the claim its volume, since `storage.retain` is Retain:\n"
    )
    story.run(f"kubectl get pvc {place}")
    story.say("## kubectl explain\n")
    for what in (
        "gms",
        "gms.spec",
        "gms.spec.limits",
        "tenant.spec.quota",
        "basemodel.spec.weights",
    ):
        story.run(f"kubectl explain {what}")


def without_chance(page: str) -> list[str]:
    """The lines without what differs from run to run; tables without widths."""
    masks = (
        (r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME"),
        (r"\d+\.\d+\.\d+\.\d+", "ADDRESS"),
        (r"(sha256:)?[0-9a-f]{16,}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "HASH"),
        (r"\b\d+(d|h|m|s|ms)\d*s?\b(?! of| limit)", "AGE"),
        (r"\b(Resource Version|Generation|Last Received Sequence):\s+\d+", "NUMBER"),
        (r" +|-{3,}", " "),
    )
    for pattern, word in masks:
        page = re.sub(pattern, word, page)
    outside, lines = True, []
    for line in page.splitlines():
        # The events of `describe` come in an order of their own, and more or fewer of them.
        if line.startswith("Events:"):
            outside = False
        elif line.startswith("```"):
            outside = True
        if outside:
            lines.append(line.strip())
    return lines


@pytest.mark.timeout(900)
def test_the_page_shows_what_kubectl_says(story: Story) -> None:
    tell(story)
    page = "\n".join(story.parts)
    if os.environ.get(WRITE):
        PAGE.write_text(page)
    assert without_chance(PAGE.read_text()) == without_chance(page)


def test_a_difference_would_be_seen() -> None:
    page = PAGE.read_text()
    assert without_chance(page) != without_chance(page.replace("first-run", "second-run"))
    assert without_chance(page) != without_chance(page.replace("Running", "Waiting"))
    aged = re.sub(r"\d{4}-\d\d-\d\dT", "2030-01-01T", page)
    assert without_chance(page) == without_chance(aged)
