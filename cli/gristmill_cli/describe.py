"""A session or a model in words, for `gristmill describe session` and `models describe`. Pure."""

from collections.abc import Iterator

from gristmill_cli.times import age, iso
from gristmill_contracts.base_model import BaseModelResource, Profile
from gristmill_contracts.session import TrainingSession
from gristmill_sessions.identity import session_name, session_uid


def describe_lines(session: TrainingSession) -> Iterator[str]:
    """Labelled lines in the manner of kubectl."""
    meta, spec, status = session.metadata, session.spec, session.status
    yield _line("Name", session_name(session))
    if session_name(session) != meta.name:
        yield _line("Resource", meta.name)
    yield _line("Tenant", meta.namespace)
    yield _line("Session id", session_uid(session))
    yield _line("State", status.state)
    yield _line("Base model", spec.base_model_ref.name)
    yield _line("LoRA", f"rank {spec.lora.rank}, alpha {spec.lora.alpha}")
    yield _line("Project", spec.project or "-")
    yield _line("Output", spec.output.path or "(the tenant's default bucket)")
    yield _line("Checkpoints", f"group {spec.output.checkpoint_group}")
    yield _line("Desired", spec.desired_state)
    yield _line("Created", _moment(meta.creation_time_us))
    yield _line("Started", _moment(status.start_time_us))
    yield _line("Ended", _moment(status.end_time_us))
    yield _line("Attempt", f"{status.attempt}, restarts {status.restarts}")
    yield _line("Last number", str(status.last_received_sequence))
    tokens = status.usage.model_dump()
    yield _line("Tokens", ", ".join(f"{name} {value}" for name, value in tokens.items()))
    if status.last_failure is not None:
        yield _line("Failure", f"{status.last_failure.reason}: {status.last_failure.message}")
    yield "Conditions:"
    width = max((len(each.type) for each in status.conditions), default=0)
    for each in status.conditions:
        text = f"  {each.type:<{width}}  {each.status:<7}  {each.reason}"
        yield f"{text}: {each.message}" if each.message else text


def model_lines(model: BaseModelResource, engine: str) -> Iterator[str]:
    """Labelled lines in the manner of kubectl. `engine` tells how the worker runs it."""
    spec = model.spec
    yield _line("Name", model.metadata.name)
    yield _line("Architecture", spec.architecture or "-")
    yield _line("Weights", f"{spec.dtype} in {spec.weights.path or '-'}")
    yield _line("Source", spec.source or "-")
    yield _line("Engine", engine)
    yield _line("Context", f"{spec.context_length or '-'} tokens")
    yield _line("Vocabulary", f"{spec.vocabulary_size or '-'} tokens")
    yield _line("Tokenizer", spec.hugging_face_id or "-")
    yield _line("Revision", spec.revision or "-")
    yield _line("Deprecated", "yes" if spec.deprecated else "no")
    yield "Profiles:"
    yield from (f"  {_profile(each)}" for each in spec.profiles)


def _profile(profile: Profile) -> str:
    device = profile.device
    claimed = f"{device.count} x {device.resource_name}" if device else "no device"
    if profile.dra:
        claimed = f"{profile.dra.count} of class {profile.dra.device_class_name}"
    needs = profile.resources
    return f"{profile.name}: cpu {needs.cpu}, memory {needs.memory}, {claimed}"


def _line(name: str, value: str) -> str:
    return f"{name + ':':<14}{value}"


def _moment(time_us: int | None) -> str:
    return f"{iso(time_us)} ({age(time_us)} ago)" if time_us else "-"
