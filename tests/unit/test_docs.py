"""The docs say what is there: the metric table is current, paths and keys exist, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridflow.config.validate import leaf_paths, sections
from hybridflow.loading import load
from hybridflow.telemetry.names import markdown_table
from jobs.cli import VERBS
from jobs.pools import WORKERS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_metric_table_is_current():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page.endswith(markdown_table()), "write docs/metrics.md anew: its head has the command"


def test_paths_of_the_tree_exist():
    block = README.partition("## The tree")[2].split("```")[1]
    folder, missing = "", []
    for line in block.strip("\n").splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
        path = ROOT / (name if not line.startswith(" ") else folder + name)
        if not (path.is_dir() if name.endswith("/") else path.is_file()):
            missing.append(str(path.relative_to(ROOT)))
    assert len(block.splitlines()) > 40 and not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not link.startswith("http") and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_ascii_and_name_no_machine(page):
    text = page.read_text(encoding="utf-8")
    assert text.isascii()
    assert not re.search(r"(?<![\w.])/(?:work|root|home|tmp)/", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_of_the_config_exist(page):
    """Whatever looks like ``block.key`` in code, with a block of ours, is a key, a block, or a method of that role."""
    known = {".".join(path) for path in (*leaf_paths(), *sections())} | {"reward_model.ground_truth"}  # verl's column
    known |= {f"{role}.{method}" for role, worker in WORKERS.items() for method in vars(load(worker))}
    blocks = {path[0] for path in sections() if path}
    code = "\n".join(re.findall(r"`[^`\n]+`|```.*?```", page.read_text(encoding="utf-8"), re.DOTALL))
    found = re.findall(r"(?<![\w./])([a-z_]+(?:\.[a-z_]+)+)(?=[(=:`\s])", code)
    assert not [key for key in found if key.split(".")[0] in blocks and key not in known and not key.endswith(".py")]


def test_the_readme_names_every_verb():
    assert all(f"hybridflow {verb}" in README for verb in VERBS)
