"""What a release is made of: workflows whose paths and targets exist, files that agree, bounds that are tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import release_agrees

import clearhead as ch

yaml: Any = pytest.importorskip("yaml", reason="workflows cannot be read: PyYAML comes with transformers")

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def read(path: Path) -> dict[str, Any]:
    # "on" is a truth value in YAML 1.1, and a word to those who read workflows
    return {"on" if key is True else key: value for key, value in yaml.safe_load(path.read_text("utf-8")).items()}


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", ())]


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_what_it_needs(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}, "what a job needs beyond reading it says itself"
    for name, job in workflow["jobs"].items():
        assert "uses" in job or {"runs-on", "timeout-minutes", "steps"} <= set(job), name
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else set(needs) <= set(workflow["jobs"]), name
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step), step
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_version(path: Path) -> None:
    workflow = read(path)
    used = [one["uses"] for one in (*steps(workflow), *workflow["jobs"].values()) if "uses" in one]
    for action in used:
        if action.startswith("./"):
            assert "workflow_call" in read(ROOT / action)["on"], action
        else:
            assert re.fullmatch(r"[\w./-]+@v\d+(\.\d+)*", action), action


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_names_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([\w-]+)", "\n".join(step.get("run", "") for step in steps(read(path)))):
        assert target in targets(), f"make {target}"
    for name in re.findall(r"(?:^|[\s\"'])((?:\.ci|\.github|src|tests|bench|docs)/[\w./*-]+|CMakeLists\.txt)", text):
        assert list(ROOT.glob(name)), name
    assert not re.search(r"https?://", text), "no host is named: what is fetched is the machine's own affair"


def test_wheels_are_made_for_every_system() -> None:
    jobs = read(GITHUB / "workflows" / "wheels.yml")["jobs"]
    systems = {one["name"] for one in jobs["wheels"]["strategy"]["matrix"]["include"]}
    linux = {f"{libc}linux_{machine}" for libc in ("many", "musl") for machine in ("x86_64", "aarch64")}
    assert systems == {*linux, "macosx_arm64", "win_amd64"}
    (made,) = (step["env"]["CIBW_BUILD"] for step in jobs["wheels"]["steps"] if "CIBW_BUILD" in step.get("env", {}))
    pythons = [one.removesuffix("-${{ matrix.name }}") for one in re.findall(r"cp\w+-\$\{\{ matrix.name \}\}", made)]
    assert [f"{one}-*" for one in pythons] == PROJECT["tool"]["cibuildwheel"]["build"]
    assert PROJECT["tool"]["scikit-build"]["wheel"]["py-api"] in pythons
    assert (ROOT / PROJECT["tool"]["cibuildwheel"]["test-command"].split("{project}/")[1]).is_file()


def test_only_one_job_may_publish() -> None:
    trusted = {}
    for path in WORKFLOWS:
        for name, job in read(path)["jobs"].items():
            if job.get("permissions", {}).get("id-token") == "write":
                trusted[path.stem, name] = job
    assert list(trusted) == [("release", "publish")]
    job = trusted["release", "publish"]
    assert job["environment"] == "release"
    assert set(job["needs"]) == {"tests", "wheels"}
    assert job["steps"][-1]["with"]["attestations"] is True


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_can_be_filled_in(path: Path) -> None:
    form = read(path)
    if path.stem == "config":
        assert set(form) == {"blank_issues_enabled", "contact_links"}
        return
    assert form["name"]
    assert form["description"]
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names)) > 0
    assert all(field["attributes"]["label"] for field in form["body"])


def test_tag_version_changelog_and_citation_agree() -> None:
    assert release_agrees.disagreements(f"v{ch.__version__}") == []
    assert release_agrees.disagreements("v9.9.9") == [f"the tag is v9.9.9, the version {ch.__version__}"]
    assert release_agrees.changes(ch.__version__)[1].count("###") > 3


def test_the_citation_has_what_the_format_asks_for() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["authors"] == [{"name": "the clearhead authors"}]
    assert citation["version"] == ch.__version__
    assert citation["license"] == PROJECT["project"]["license"]


def test_every_dependency_has_a_lower_bound() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    for one in [*named, *(one for extra in extras.values() for one in extra)]:
        assert re.match(r"[\w-]+(\[\w+\])?(>=|==)\d", one), one


def test_the_oldest_versions_are_the_bounds() -> None:
    # what `make test-oldest` installs is what pyproject.toml promises, package by package
    oldest = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "tests/oldest.txt").read_text("utf-8"), re.MULTILINE))
    project = PROJECT["project"]
    wanted = [one for extra in ("plot", "safetensors") for one in project["optional-dependencies"][extra]]
    for one in [*project["dependencies"], *wanted]:
        name, bound = one.split(">=")
        assert (oldest[name] + ".").startswith(bound + "."), f"{one}, and {oldest[name]} is tested"


def test_what_is_tested_with_is_within_the_bounds() -> None:
    # each package that the tests and the site ask for has one version, and it is one that pyproject.toml allows
    tested = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "tests/tested.txt").read_text("utf-8"), re.MULTILINE))
    project = PROJECT["project"]
    wanted = [one for extra in project["optional-dependencies"].values() for one in extra if "minilm" not in one]
    for one in [*project["dependencies"], *wanted]:
        found = re.match(r"([\w-]+)(>=|==)([\w.]+)", one)
        assert found, one
        name, how, bound = found.groups()
        version, least = ([int(part) for part in text.split(".")] for text in (tested[name], bound))
        assert version == least if how == "==" else version >= least, f"{one}, and {tested[name]} is tested"
