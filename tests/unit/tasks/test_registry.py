"""Tasks by name: they may live in any package, and say what they need and no more."""

import sys

import pytest

from keepstep.errors import ConfigError
from keepstep.tasks.registry import build_task, config_class, load_task_config
from keepstep.tasks.task import DataShare

LIGHT = """
from dataclasses import dataclass
from keepstep.config.explain import Problem
from keepstep.config.schema import Config

@dataclass(frozen=True, kw_only=True)
class Cars(Config):
    wheels: int = 4

CONFIG = Cars

def build(config, share):
    return ("built", config.wheels)
"""
CHECK = """
def check(config):
    return [Problem(path="wheels", message="must be 4")] if config.wheels != 4 else []
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a package with a task, as pip would: a module and its entry points."""

    def install(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[keepstep.tasks]\n{name} = {name}\n")
        monkeypatch.delitem(sys.modules, name, raising=False)

    monkeypatch.syspath_prepend(tmp_path)
    return install


def write(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def test_a_task_of_another_package_brings_its_config_its_checks_and_itself(installed, tmp_path):
    installed("cars_one", LIGHT + CHECK)
    path = write(tmp_path, 'task = "cars_one"\nwheels = 3\n')
    with pytest.raises(ConfigError, match=r"c\.toml:2: wheels: must be 4"):
        load_task_config(path, [])
    config = load_task_config(path, ["--wheels=4"]).config
    assert build_task(config, DataShare()) == ("built", 4)
    assert type(config).__name__ == "Cars"


def test_a_task_needs_no_checks(installed, tmp_path):
    installed("cars_two", LIGHT)
    config = load_task_config(write(tmp_path, ""), ["--task=cars_two", "--wheels=3"]).config
    assert build_task(config, DataShare()) == ("built", 3)


def test_a_task_that_cannot_be_imported_is_named_with_the_reason(installed, tmp_path):
    installed("cars_three", "import no_such_thing_at_all\n")
    path = write(tmp_path, '\ntask = "cars_three"\n')
    with pytest.raises(ConfigError, match=r"c\.toml:2: the task 'cars_three' .*no_such_thing"):
        load_task_config(path, [])


def test_a_task_that_is_not_there_is_an_error_that_lists_the_others(tmp_path):
    with pytest.raises(ConfigError, match=r"no task 'langage'; there are language; did you mean"):
        config_class("langage")
    with pytest.raises(ConfigError, match=r"c\.toml:1: there is no task '3'"):
        load_task_config(write(tmp_path, "task = 3\n"), [])
