"""The pages are true: their code runs and prints what they show, their links lead somewhere."""

import contextlib
import functools
import importlib
import io
import re
import shlex
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import pytest

from piston import cli, presets
from piston.cli import train

REPOSITORY = Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"
# A block of Python, and what it prints if the page shows that directly below it.
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!`)\[[^]]*\]\(([^)\s]+)\)")
PAGES = sorted(
    page for place in ("*.md", "docs/*.md", "packages/*/*.md") for page in REPOSITORY.glob(place)
)
# `your-robot.md` has commands between its blocks: see below.
PROGRAMS = [
    page for page in PAGES if BLOCK.search(page.read_text("utf-8")) and page.name != "your-robot.md"
]
MARK = "\x1e"  # between the outputs of two blocks


def name_of(page):
    return page.relative_to(REPOSITORY).as_posix()


@pytest.mark.parametrize("page", PROGRAMS, ids=name_of)
def test_code_of_page_runs_and_prints_what_it_shows(page, tmp_path):
    blocks, shown = zip(*BLOCK.findall(page.read_text("utf-8")))
    script = tmp_path / "page.py"
    script.write_text(f"\nprint({MARK!r}, end='')\n".join(blocks), "utf-8")
    result = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for code, expected, found in zip(blocks, shown, result.stdout.split(MARK), strict=True):
        if expected:
            assert found == expected, code


def anchors(page):
    """The names by which the headings of a page can be linked to, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text("utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


OWN_ROBOT = DOCS / "your-robot.md"
OWN_ROBOT_BLOCK = re.compile(r"^```(python|sh|toml|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# How a script that runs this page begins, and what becomes of its commands.
BEGIN = """
import contextlib, dataclasses, os
from pathlib import Path
from piston import presets
from piston.cli import main
from piston.inference.loading import load_policy
from piston.robots.description import read_robot
from piston.serving import running_server
servers = contextlib.ExitStack()
"""
COMPARE = """
Path("shown.toml").write_text({text!r})
shown = read_robot("shown.toml")
assert dataclasses.replace(shown, grippers={{}}) == read_robot("my_arm.toml")
os.replace("shown.toml", "my_arm.toml")
"""
EXPORT = "os.environ[{!r}] = {!r}; presets.import_user_presets.cache_clear()"
SERVE = "address = servers.enter_context(running_server(load_policy({!r}))).url"
PING = "assert main(['client', 'ping', address, '--count', '2']) == 0"
SHORT = ["--num-train-steps", "2", "--batch-size", "2", "--noise-draws", "1"]


def as_python(kind, text):
    if kind == "toml":
        return COMPARE.format(text=text)
    if kind == "python":
        is_file = "presets.register" in text
        return f"Path('degrees_arm.py').write_text({text!r})" if is_file else text
    lines = []
    for command in map(shlex.split, text.splitlines()):
        if command[0] == "export":
            lines.append(EXPORT.format(*command[1].split("=")))
        elif command[1] == "serve":
            lines.append(SERVE.format(command[2].replace("1499", "1")))
        elif command[1] == "client":
            lines.append(PING)
        else:
            short = SHORT if command[1] == "train" else []
            lines.append(f"assert main({[*command[1:], *short]}) == 0")
    return "\n".join(lines)


def test_the_way_to_a_robot_of_your_own(tmp_path):
    """Every block of the page, in order: recording, file, commands, server, robot."""
    blocks = OWN_ROBOT_BLOCK.findall(OWN_ROBOT.read_text("utf-8"))
    code = [as_python(kind, text) for kind, text in blocks if kind != "text"]
    script = tmp_path / "page.py"
    text = "\n".join([BEGIN, *code, "servers.close()"])
    script.write_text(text.replace('Client("127.0.0.1")', "Client(address)"), "utf-8")
    result = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for kind, expected in blocks:
        assert kind != "text" or expected in result.stdout
    robot, recording, driving, *_ = (text for kind, text in blocks if kind == "python")
    own = [line for line in f"{robot}{recording}{driving}".splitlines() if line.strip()]
    assert len(own) <= 50


MIGRATION = DOCS / "coming-from-openpi.md"
# A table is named by the headings above it: its system and its subject.
ROW = re.compile(r"^\| (?P<theirs>.*?) \| (?P<ours>.*) \|$")
SPAN = re.compile(r"`([^`]+)`")


def migration_spans():
    """Yield the subject of a table and each code span in its last column."""
    subject = None
    for line in MIGRATION.read_text("utf-8").splitlines():
        if line.startswith("#"):
            subject = line.lstrip("# ")
        elif (row := ROW.match(line)) and row["ours"] != "Piston":
            for span in SPAN.findall(row["ours"]):
                yield subject, span


def parses_in_training(preset, *options):
    name = [] if "--exp-name" in options else ["--exp-name", "x"]
    return train.parse([preset, *options, *name]).name == preset


def joined(option_lists):
    """Yield lists of options that can be parsed together, because parsing takes a while."""
    together = []
    for options in option_lists:
        names = {word for word in options if word.startswith("--")}
        if names & {*together, "--resume"}:  # which contradicts one before it
            yield together
            together = []
        together = [*together, *options]
    yield together


@functools.cache
def help_of(*command):
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        cli.main([*command, "--help"])
    return shown.getvalue()


def has_options(verb, *rest):
    """Whether the help of a command, such as `serve` or `data check`, shows all its options."""
    command = (verb, rest[0]) if verb in ("data", "client") else (verb,)
    options = [word for word in rest if word.startswith("--")]
    return all(re.search(rf"(?m)(^|\s){option}\b", help_of(*command)) for option in options)


def exists(dotted):
    """Whether `piston.module.Class.attribute` exists; a field of a dataclass is an attribute."""
    package, *rest = dotted.split(".")
    found = importlib.import_module(package)
    for position, name in enumerate(rest, start=1):
        if isinstance(found, types.ModuleType) and not hasattr(found, name):
            found = importlib.import_module(".".join([package, *rest[:position]]))
        elif name in getattr(found, "__dataclass_fields__", ()):
            found = None
        else:
            found = getattr(found, name)
    return True


def test_options_of_the_migration_tables_parse():
    options = [shlex.split(span) for _, span in migration_spans() if span.startswith("--")]
    assert len(options) > 20
    for together in joined(options):
        assert parses_in_training("pi0_aloha_pen_uncap", *together)


def test_commands_and_names_of_the_migration_tables_exist():
    kinds = Counter()
    source = "".join(path.read_text("utf-8") for path in (REPOSITORY / "src").rglob("*.py"))
    for subject, span in migration_spans():
        words = shlex.split(span)
        if words[0] == "torchrun":
            words = ["piston", *words[words.index("piston.cli") + 1 :]]
        if words[0] == "piston" and words[1] in ("train", "stats"):
            kind, is_right = "command", parses_in_training(*words[2:])
        elif words[0] == "piston":
            kind, is_right = "command", words[1] in cli.VERBS and has_options(*words[1:])
        elif span.startswith(("piston.", "piston_client.")):
            kind, is_right = "name", exists(span)
        elif subject == "Checkpoints":
            kind, is_right = "preset", span in presets.names()
        elif not span.startswith("--"):
            kind, is_right = "text", span == "owner/name" or span.split("/")[-1] in source
        assert is_right, span
        kinds[kind] += 1
    assert min(kinds[kind] for kind in ("command", "name", "preset")) > 5, kinds
