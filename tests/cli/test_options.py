"""Numbers that no size and no time can be are refused in one line, before anything is done."""

from pathlib import Path

import pytest

from worlds.running import Run


@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1e300"])
def test_a_file_size_that_is_no_size_is_one_line(run: Run, tmp_path: Path, number: str) -> None:
    ran = run("ingest", tmp_path, "--kb", tmp_path / "kb", f"--max-file-mb={number}")
    assert (ran.code, ran.err.count("\n")) == (2, 1), ran.err
    assert "'--max-file-mb'" in ran.err
    assert not (tmp_path / "kb").exists()


@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1e300"])
@pytest.mark.parametrize(
    "option", ["max-body-mb", "max-upload-mb", "timeout", "host-gb", "grace", "lame"]
)
def test_a_limit_of_the_server_that_is_no_number_is_one_line(
    run: Run, tmp_path: Path, option: str, number: str
) -> None:
    # a model that is not there ends those that are let through
    ran = run("serve", "--model", tmp_path / "none", f"--{option}={number}")
    assert (ran.code, ran.err.count("\n")) == (2, 1), ran.err
    assert f"'--{option}'" in ran.err


def test_the_help_of_quant_names_the_limit_that_holds() -> None:
    from kvweave.cli.ask import command
    from kvweave.model.load import AUTO_KL

    (option,) = (each for each in command.params if each.name == "quant")
    assert f"under {AUTO_KL:g} nats per token" in str(getattr(option, "help", ""))
