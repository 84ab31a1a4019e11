"""The instructions of deploy/images and deploy/compose.yaml. scripts/test-images builds and runs the images."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from machine import NEVER_S, WAIT_MAX_S, free_port

import shadowserve
from shadowserve_tools.processes import started

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = {name: (DEPLOY / "images" / name).read_text() for name in ("Containerfile", "Containerfile.bluefield")}


def stages(name: str) -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage, including those of a stage that it continues."""
    lines = re.sub(r"\\\n", " ", FILES[name]).splitlines()
    found: dict[str, list[tuple[str, str]]] = {"": []}
    stage = ""
    for kind, text in (line.split(None, 1) for line in lines if line and not line.startswith("#")):
        if kind == "FROM":
            before, _, stage = text.partition(" AS ")
            found[stage] = [*found.get(before, [])]
        found[stage].append((kind, text))
    return found


def last(instructions: list[tuple[str, str]], kind: str) -> str:
    return [text for name, text in instructions if name == kind][-1]


def test_every_image_runs_without_rights_and_has_the_version_of_the_code() -> None:
    images = [*(stages("Containerfile")[name] for name in ("storage", "data-plane", "engine"))]
    for image in (*images, stages("Containerfile.bluefield")[""]):
        assert last(image, "USER") == "6380:6380" and image[-1][0] in ("ENTRYPOINT", "LABEL")
        assert f"VERSION={shadowserve.__version__}" in [text for kind, text in image if kind == "ARG"]


@pytest.mark.parametrize(("stage", "section"), [("storage", "STORAGE"), ("data-plane", "DPU")])
def test_what_a_container_runs_works_and_its_health_check_detects_its_end(
    stage: str, section: str, tmp_path: Path
) -> None:
    image = stages("Containerfile")[stage]
    settings = dict(re.findall(r"(SHADOWSERVE_\w+)=(\S+)", last(image, "ENV")))
    settings |= {name: "127.0.0.1" for name, value in settings.items() if value == "0.0.0.0"}  # noqa: S104
    own = {"STORAGE": {"PORT": "0"}, "DPU": {"LISTEN": f"unix:{tmp_path}/dpu.sock"}}[section]
    own["METRICS_PORT"] = str(free_port())
    assert {f"SHADOWSERVE_{section}_{name}" for name in own} - {"SHADOWSERVE_STORAGE_PORT"} <= settings.keys()
    settings |= {f"SHADOWSERVE_{section}_{name}": value for name, value in own.items()}
    check = json.loads(last(image, "HEALTHCHECK").partition("CMD ")[2])
    program, *arguments = json.loads(last(image, "ENTRYPOINT"))
    assert program == "shadowserve"

    def healthy() -> bool:
        command = [sys.executable, *check[1:]]
        done = subprocess.run(command, env=os.environ | settings, capture_output=True, timeout=NEVER_S, check=False)
        return done.returncode == 0

    command = [sys.executable, "-m", "shadowserve_tools", *arguments]
    with started(stage, command, tmp_path, environment=settings, timeout_s=WAIT_MAX_S) as child:
        assert healthy()
        child.process.send_signal(signal.SIGTERM)
        assert child.process.wait(WAIT_MAX_S) == 0
    assert not healthy()


def test_compose_builds_targets_of_the_container_file_and_gives_programs_settings_that_exist() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    reference = (DEPLOY.parent / "docs" / "reference" / "configuration.md").read_text()
    for name, service in services.items():
        assert service["build"]["target"] == name and name in stages("Containerfile")
        assert service["image"] == f"shadowserve-{name}" and service["read_only"] and service["cap_drop"] == ["ALL"]
        for variable in service.get("environment", {}):
            assert variable in reference or variable.split("_", 2)[2].lower() in reference, variable
