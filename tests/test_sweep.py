"""`training/sweep.py` without training: grids become flags, and reports show what the records hold.

Whole sweeps are in tests/test_supervised_scripts.py.
"""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import sweep
import yaml
from conftest import ROOT
from PIL import Image
from sweep_report import write_report
from sweep_tables import effect_table, format_tables

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining
from hf_decayed.errors import UserError
from hf_decayed.models.image_processing_decayed import default_image_processor


RECORDS = {path.stem: path for path in (ROOT / "model_cards" / "results").glob("small_*/*.jsonl")}
ENCODER_PLOTS = {
    "accuracy_against_decay.png",
    "rank_and_accuracy.png",
    "losses.png",
    "accuracy_by_layer.png",
    "use_of_skips.png",
}


@pytest.mark.parametrize(
    "grid, plots, missing",
    [
        ("bundled_decay", ENCODER_PLOTS, "tsne.png not drawn: The folder of the run 'plain preset' is not in "),
        ("cifar100_levers", ENCODER_PLOTS - {"use_of_skips.png"}, "tsne.png not drawn: The folder of the run"),
        ("cifar100_uvit", {"over_training.png", "blocks.png"}, "samples.png not drawn: The samples of the run '1.0'"),
        ("resnet_rank", {"rank_against_depth.png"}, None),
    ],
)
def test_sweep_report_without_run_folders(grid, plots, missing, tmp_path, capsys):
    """All plots that need only the records are drawn; one line says which one is missing and why."""
    shutil.copy(RECORDS[grid], tmp_path / "results.jsonl")
    sweep.main([grid, "--report", "--output_dir", str(tmp_path)])
    report = tmp_path / "report"
    assert {path.name for path in report.glob("*.png")} == plots
    assert all((report / name).stat().st_size > 5000 for name in plots)
    printed = capsys.readouterr().out
    assert (report / "tables.md").read_text() in printed
    lines = [line for line in printed.splitlines() if " not drawn: " in line]
    assert lines == [] if missing is None else len(lines) == 1 and lines[0].startswith(missing)


def test_sweep_report_draws_patches_of_every_run(tmp_path, capsys):
    records = sweep.read_records(RECORDS["bundled_decay"])[:2]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = DecayedViTMAEConfig(
        image_size=28,
        patch_size=14,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=16,
    )
    flags = ["bundled_decay", "--report", "--dataset_name", "bundled", "--output_dir", str(tmp_path)]
    DecayedViTMAEForPreTraining(config).save_pretrained(tmp_path / records[0]["folder"])
    sweep.main(flags)
    assert "patches.png not drawn: The folder of the run " in capsys.readouterr().out
    DecayedViTMAEForPreTraining(config).save_pretrained(tmp_path / records[1]["folder"])
    default_image_processor(28, 1).save_pretrained(tmp_path / records[1]["folder"])
    sweep.main(flags)
    assert "patches.png" not in capsys.readouterr().out
    assert Image.open(tmp_path / "report" / "patches.png").size[0] > 1000

    # Folders of another seed do as well, but all of the same one.
    others = [{**record, "seed": 1, "folder": f"{record['folder']}-other"} for record in records]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records + others))
    shutil.move(tmp_path / records[1]["folder"], tmp_path / others[1]["folder"])
    sweep.main(flags)
    assert "patches.png not drawn: No seed has the folders of all runs" in capsys.readouterr().out
    shutil.copytree(tmp_path / records[0]["folder"], tmp_path / others[0]["folder"])
    sweep.main(flags)
    assert "patches.png" not in capsys.readouterr().out


def test_sweep_report_of_several_kinds(tmp_path):
    """What is shown follows from the records, not from the name of a script."""
    records = [sweep.read_records(RECORDS[grid])[0] for grid in ("bundled_decay", "cifar100_uvit", "resnet_rank")]
    for record in records:
        del record["script"]
    tables = format_tables(records)
    assert tables == "\n".join(format_tables([record]) for record in records)
    assert (
        "| raw pixels |" in tables and "| 2000 held-out images |" in tables and "| shortcut_decay | blocks |" in tables
    )
    write_report(records, tmp_path)
    expected = ENCODER_PLOTS - {"use_of_skips.png"} | {"over_training.png", "blocks.png", "rank_against_depth.png"}
    assert {path.name for path in (tmp_path / "report").glob("*.png")} == expected


def test_sweep_report_of_data_without_labels(tmp_path):
    """Accuracies that were not measured leave their cells and curves empty."""
    records = sweep.read_records(RECORDS["bundled_decay"])
    for record in records:
        record["results"]["knn_accuracy_untrained"] = None
        for row in [*record["evaluation"].values(), *record["curve"]]:
            for metric in ("knn_accuracy", "linear_accuracy"):
                row.pop(metric, None)
    write_report(records, tmp_path)
    table = (tmp_path / "report" / "tables.md").read_text()
    cells = table.splitlines()[2].split("|")
    assert cells[5:10] == ["  "] * 5 and float(cells[10].split()[0]) > 0 and "Untrained" not in table
    assert {path.name for path in (tmp_path / "report").glob("*.png")} == ENCODER_PLOTS


@pytest.mark.parametrize("module", ["matplotlib", "sklearn.manifold"])
def test_sweep_report_names_the_missing_extra(module, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    shutil.copy(RECORDS["bundled_decay"], tmp_path / "results.jsonl")
    sweep.main(["bundled_decay", "--report", "--output_dir", str(tmp_path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if "pip install 'hf_decayed[training]'" in line]
    assert len(lines) == 1 and (tmp_path / "report" / "tables.md").exists()
    expected = {"tsne.png"} if module == "sklearn.manifold" else ENCODER_PLOTS
    assert set(lines[0].partition(" not drawn: ")[0].split(", ")) == expected


def test_sweep_report_refuses_unknown_runs(tmp_path):
    shutil.copy(RECORDS["bundled_decay"], tmp_path / "results.jsonl")
    with pytest.raises(ValueError, match="There is no run unknown; there are plain preset, "):
        sweep.main(["bundled_decay", "--report", "--output_dir", str(tmp_path), "--tsne", "plain preset", "unknown"])


def record_of(run: str, seed: int, knn: float, miou: float) -> dict:
    features = {"knn_accuracy": knn, "knn_whitened_accuracy": 0.4, "linear_accuracy": 0.5, "effective_rank": 2.0}
    results = {"cluster_miou": miou, "position_accuracy": 0.3}
    return {"name": run, "seed": seed, "results": results, "evaluation": {"last.cls": features, "last.mean": features}}


def test_effects_are_counted_seed_by_seed():
    """Seeds that only one of the two runs has are left out; equal values are no effect."""
    records = [
        record_of("decayed", 0, 0.46, 0.15),
        record_of("decayed", 1, 0.43, 0.2),
        record_of("undecayed", 1, 0.40, 0.1),
        record_of("undecayed", 0, 0.40, 0.11),
        record_of("undecayed", 2, 0.40, 0.1),
    ]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in effect_table(records, "decayed", "undecayed").splitlines()
    ]
    assert rows[0] == ["decayed, against undecayed", "seed 0", "seed 1", "mean", "goal", "met"]
    cells = {row[0]: row[1:] for row in rows[2:]}
    assert cells["kNN, class token (points)"] == ["+6.0", "+3.0", "+4.5", "+5 or more", "1 of 2"]
    assert cells["kNN, whitened (points)"] == ["+0.0", "+0.0", "+0.0", "above 0", "0 of 2"]
    assert cells["segmentation (times)"] == ["1.36", "2.00", "1.68", "1.5 or more", "1 of 2"]
    assert cells["rank, mean (times)"] == ["1.00", "1.00", "1.00", "below 1", "0 of 2"]
    assert effect_table(records, "decayed", "plain") == ""
    del records[0]["results"]["cluster_miou"]  # data without masks
    assert "segmentation" not in effect_table(records, "decayed", "undecayed")
    classifiers = sweep.read_records(RECORDS["resnet_rank"])  # have no such metrics
    assert effect_table(classifiers, classifiers[1]["name"], classifiers[0]["name"]) == ""


def test_effects_on_samples_and_blocks():
    """Two seeds of the same records: the table has their ranges, and the changes of samples and best cells."""
    records = sweep.read_records(RECORDS["cifar100_uvit"])
    records += [{**record, "seed": 1} for record in records]
    rows = [line.strip("| ").split(" | ") for line in effect_table(records, "0.7", "1.0").splitlines()[2:]]
    assert rows == [
        ["Frechet distance (times)", "1.70", "1.70", "1.70", "below 1", "0 of 2"],
        ["linear, best cell (points)", "-2.8", "-2.8", "-2.8", "above 0", "0 of 2"],
        ["linear, all cells (points)", "-4.0", "-4.0", "-4.0", "above 0", "0 of 2"],
        ["kNN, best cell (points)", "-3.0", "-3.0", "-3.0", "above 0", "0 of 2"],
        ["kNN, all cells (points)", "-3.7", "-3.7", "-3.7", "above 0", "0 of 2"],
    ]
    assert "| 1.0 | 2 | 0.176 (0.176-0.176) | 0.268 (0.268 to 0.268) +- 0.014 |" in format_tables(records)


@pytest.mark.parametrize("grid", ["bundled_decay", "cifar100_patch8", "cifar100_uvit", "resnet_rank"])
def test_sweep_keys_and_folders_stay(grid):
    """A sweep that an earlier version started is continued: runs are recognised by the hash of their settings."""
    data = dict.fromkeys(("dataset_name", "dataset_path", "label_column_name"))
    if grid.startswith("cifar100"):
        data |= {"dataset_path": "cifar100", "label_column_name": "fine_label"}
    runs = {run["key"]: run for run in sweep.expand(sweep.parse_arguments([grid])[1], data)}
    for record in sweep.read_records(RECORDS[grid]):
        run = runs[record["key"]]
        assert {name: record[name] for name in run} == run


def test_sweep_settings_become_flags_or_config_fields():
    settings = {"recipe": "tiny", "sample_every": 2, "eval_samples": 9, "conditional": False, "hidden_size": 32}
    words = sweep.as_flags({"script": "uvit", "settings": settings})
    expected = ["--recipe", "tiny", "--sample_every", "2", "--eval_samples", "9", "--conditional", "false"]
    assert words == [*expected, "--set", "hidden_size=32"]
    settings = {"crop_scale": [0.6, 1.0], "zero_init_branches": True, "shortcut_decay": "auto"}
    words = sweep.as_flags({"script": "mae", "settings": settings})
    assert words == ["--crop_scale", "0.6", "1.0", "--set", "zero_init_branches=true", "--shortcut_decay", "auto"]
    with pytest.raises(ValueError, match="script 'unknown' is not in training/"):
        sweep.as_flags({"script": "unknown", "settings": {}})


@pytest.mark.parametrize(
    "content, flags, message",
    [
        ({"axes": {"shortcut_decay": [1.0]}, "seed": [0]}, [], "has unknown keys: seed"),
        ({"flags": {"batch_size": 4}}, [], "needs `runs`, `axes`, or both"),
        (
            {"runs": {"a": {}}, "effects": [["a", "b"]]},
            [],
            "must be pairs of its runs, each a run and its baseline, got ['a', 'b']",
        ),
        ({"runs": {"a": {}, "b": {}}, "effects": ["a", "b"]}, [], "must be pairs of its runs"),
        ("axes: [", [], "is not YAML"),
        ({"axes": {"shortcut_decay": [1.0]}}, ["--only", "("], "--only is not a regular expression"),
        ({"axes": {"shortcut_decay": [1.0]}}, ["--cpu_threads", "0"], "--cpu_threads: must be at least 1"),
    ],
)
def test_sweep_refuses_wrong_grids_in_one_line(content, flags, message, tmp_path, capsys):
    path = tmp_path / "grid.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(SystemExit) as error:
        sweep.parse_arguments([str(path), *flags])
    printed = capsys.readouterr().err
    assert error.value.code == 2 and message in printed and len(printed.splitlines()) == 1


def test_sweep_does_not_mix_results(tmp_path):
    """Of other settings or data, or by another feature network; half a line is a run to do again."""
    file, options = tmp_path / "results.jsonl", SimpleNamespace(output_dir=tmp_path, feature_net="pixels")
    run = {"name": "plain", "seed": 0, "key": "a"}
    file.write_text('{"name": "plain", "se')
    assert sweep.read_records(file) == []
    sweep.write_record(file, run)
    sweep.write_record(file, {**run, "seed": 1, "key": "b"})
    records = sweep.read_records(file)
    assert [record["key"] for record in records] == ["a", "b"]
    sweep.check_records(records, [run], options)
    with pytest.raises(UserError, match="holds results of 'plain' with other settings or data"):
        sweep.check_records(records, [{**run, "key": "c"}], options)
    with pytest.raises(UserError, match="holds results of 'plain' with other settings or data"):
        sweep.check_records([*records, {**run, "key": "c"}], [], options)
    with pytest.raises(UserError, match="holds samples compared by the feature network other"):
        sweep.check_records([{**run, "samples": {}, "feature_net": "other"}], [run], options)


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"model_index.json": {"_class_name": "DecayedUViTPipeline"}}, ["samples", "blocks"]),
        ({"config.json": {"architectures": ["DecayedResNetForImageClassification"]}}, []),
    ],
)
def test_sweep_evaluates_what_the_folder_holds(files, expected, tmp_path, monkeypatch):
    """Whatever the script is called."""
    folder = tmp_path / "run"
    (folder / "unet").mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps({"shortcut_decay": 0.7, **content}))
    (folder / "unet" / "config.json").write_text(json.dumps({"shortcut_decay": 0.7}))
    (folder / "results.json").write_text(json.dumps({"loss": 1.0}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0, "epoch": 0.1}) + "\n")
    commands = []

    def run_process(command, name):
        assert command[1:3] == ["-m", "hf_decayed.evaluation"] and name == "hf-decayed evaluate"
        commands.append(command)
        with open(command[command.index("--output") + 1], "w") as file:
            json.dump({"rows": {}, "protocol": {}, "seconds": 1}, file)

    monkeypatch.setattr(sweep, "run_process", run_process)
    options, _ = sweep.parse_arguments(["bundled_decay", "--output_dir", str(tmp_path), "--feature_net", "inception"])
    evaluation = {"samples": {"num_samples": 20}, "blocks": {"metrics": "linear"}}
    record = sweep.train_and_evaluate({"script": "unknown"}, folder, evaluation, options)
    assert record == {
        "results": {"loss": 1.0},
        "curve": [{"step": 1, "loss": 1.0, "epoch": 0.1}],
        **({"feature_net": "inception"} if expected else {}),
        **{name: {"rows": {}, "protocol": {}} for name in expected},
    }
    assert len(commands) == len(expected)
    if commands:
        samples, blocks = (" ".join(command) for command in commands)
        assert "--num_samples 20 --feature_net inception" in samples and "--metrics" not in samples
        assert "--metrics linear" in blocks and "--feature_net" not in blocks
