"""Models written and read again; what is broken or could run code is refused."""

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import caaseg
from caaseg.models import HEADS
from caaseg.models.weights import read_tensors

CLASSES, PALETTE = ["road", "tree", "sky"], [(128, 64, 128), (0, 128, 0), (70, 130, 180)]


def build(head: str = "caa", **options: Any) -> caaseg.Segmenter:
    small = {"backbone": "test_resnet", "num_classes": 3, "channels": 16, "key_channels": 4, "gate_width": 8}
    model = caaseg.create_model(head, **{**small, "classes": CLASSES, "palette": PALETTE, **options})
    model(torch.randn(2, 3, 33, 33))  # batch norm statistics that are not the initial ones
    return model.eval()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("head", HEADS)
def test_saved_and_loaded_is_bit_identical(head: str, tmp_path: Path) -> None:
    model = build(head, aux=True, decoder=True)
    model.save_pretrained(tmp_path)
    loaded = caaseg.load_model(tmp_path)
    assert loaded.config == model.config
    assert not loaded.training
    mine, theirs = model.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    images = torch.randn(2, 3, 40, 51)
    assert torch.equal(model(images).logits, loaded(images).logits)


def test_a_folder_holds_weights_config_and_card(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    config = json.loads((saved / "config.json").read_text())
    assert config["classes"] == CLASSES
    assert config["palette"] == [list(color) for color in PALETTE]
    card = (saved / "README.md").read_text()
    assert "# caa on test_resnet, 3 classes" in card
    assert "| 1 | tree | 0, 128, 0 |" in card
    assert "library_name: caaseg" in card
    assert card.startswith("---\n")


def test_a_model_of_an_older_version_is_seen_as_it_was(saved: Path) -> None:
    """It knows nothing of options that came later."""
    config = json.loads((saved / "config.json").read_text())
    for name in ("input_upsampling", "stages"):
        del config[name]
    (saved / "config.json").write_text(json.dumps(config))
    assert caaseg.load_model(saved).config == build().config


def test_the_card_says_what_is_not_usual(saved: Path, tmp_path: Path) -> None:
    assert "backbone `test_resnet`, output stride\n16. The heads" in (saved / "README.md").read_text()
    model = build(stages=3, input_upsampling=1.5)
    model.save_pretrained(tmp_path / "other")
    card = (tmp_path / "other" / "README.md").read_text()
    assert "backbone `test_resnet` up to stage 3, output stride\n16, images upsampled 1.5 times. The heads" in card
    loaded, images = caaseg.load_model(tmp_path / "other"), torch.randn(1, 3, 40, 51)
    assert (loaded.config.stages, loaded.config.input_upsampling) == (3, 1.5)
    assert torch.equal(model(images).logits, loaded(images).logits)


def test_all_files_may_be_read_by_the_same_people(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_a_channels_last_model_in_half_precision_is_saved_so_and_loaded_in_full(tmp_path: Path) -> None:
    model = build().to(memory_format=torch.channels_last).half()  # type: ignore[call-overload]
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["classifier.weight"].dtype == torch.float16
    loaded = caaseg.load_model(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert loaded.classifier.weight.dtype == torch.float32
    assert loaded(torch.randn(1, 3, 33, 40)).logits.isfinite().all()


def test_a_run_s_folder_and_from_pretrained_work_too(saved: Path) -> None:
    assert caaseg.load_model(saved.parent).config == caaseg.load_model(saved).config
    assert caaseg.Segmenter.from_pretrained(saved).config == caaseg.load_model(str(saved)).config


def test_a_pytorch_file_is_read_without_running_code(saved: Path) -> None:
    state = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    torch.save(state, saved / "pytorch_model.bin")
    loaded = caaseg.load_model(saved)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in state.items())


def test_another_number_of_classes_keeps_all_but_the_classifiers(tmp_path: Path) -> None:
    model = build("danet", aux=True)
    model.save_pretrained(tmp_path)
    message = "was trained on 3 classes and is loaded with 7: the classifiers are initialized anew"
    with pytest.warns(UserWarning, match=message):
        loaded = caaseg.load_model(tmp_path, num_classes=7)
    assert loaded.config.num_classes == 7
    assert loaded.config.classes is None
    changed = {name for name, tensor in loaded.state_dict().items() if not _equal(tensor, model.state_dict()[name])}
    assert changed == {
        f"{name}.{kind}"
        for name in ("classifier", "branch_classifiers.spatial", "branch_classifiers.channel", "aux.2")
        for kind in ("weight", "bias")
    }
    assert loaded(torch.randn(1, 3, 33, 33)).logits.shape == (1, 7, 33, 33)


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second)


def test_the_same_number_of_classes_is_no_change(saved: Path) -> None:
    assert caaseg.load_model(saved, num_classes=3).config.classes == tuple(CLASSES)


class Bomb:
    """Pickled, it would write a file when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch exploded",)


def test_a_pickle_that_would_run_code_is_refused(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (saved / "model.safetensors").unlink()
    for write in (lambda path: torch.save({"classifier.weight": Bomb()}, path), _plain_pickle):
        write(saved / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"pytorch_model\.bin: refused, because it contains more than tensors"):
            caaseg.load_model(saved)
    assert not (tmp_path / "exploded").exists()


def _plain_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb()))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_said(saved: Path, name: str, share: float) -> None:
    state = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    if name.endswith(".bin"):
        torch.save(state, saved / name)
    else:
        save_file(state, saved / name)
    whole = (saved / name).read_bytes()
    (saved / name).write_bytes(whole[: int(len(whole) * share)])
    kind = "PyTorch" if name.endswith(".bin") else "safetensors"
    with pytest.raises(ValueError, match=rf"{re.escape(name)}: (damaged or not a {kind} file|refused)"):
        caaseg.load_model(saved)


def change_config(folder: Path, **changed: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head": "transformer"}, "config.json: head is transformer; expected fcn, axial"),
        ({"num_classes": 4, "classes": None, "palette": None}, "the weights do not fit the model; 2 of another shape"),
        ({"num_classes": "many"}, "num_classes"),
        ({"color": "blue"}, "color"),
        ({"output_stride": 32}, "output_stride"),
        ({"backbone": "resnet18"}, "the weights do not fit the model; "),
        ({"decoder": True}, "the weights do not fit the model; "),
        ({"classes": ["a"]}, "classes has 1 entries, but num_classes is 3"),
        ({"backbone": "os.system"}, "config.json: backbone 'os.system' is not a timm model"),
        ({"num_classes": 10**12, "classes": None, "palette": None}, "expected an integer from 1 to 255"),
        ({"gate_layers": 10**6}, "gate_layers is 1000000; expected an integer from 1 to 100"),
        ({"gate_layers": 0}, "config.json: gate_layers is 0; expected an integer from 1 to 100"),
        ({"channels": 60_000}, "the weights do not fit the model; "),
        ({"__path__": 3}, "config.json: "),
        ({"multi_grid": [0]}, "multi_grid is 0; expected a list of integers from 1 to 1000, or none"),
        ({"palette": [[300, 0, 0]] * 3}, "expected a list of groups of 3 integers from 0 to 255, or none"),
    ],
)
def test_a_config_that_does_not_fit_is_said(saved: Path, changed: dict[str, Any], message: str) -> None:
    change_config(saved, **changed)
    with pytest.raises(ValueError, match=re.escape(message)):
        caaseg.load_model(saved)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "\x00\x01", '"caa"', "null", "[" * 100_000], ids=range(7))
def test_a_config_that_is_no_config_is_said(saved: Path, text: str) -> None:
    (saved / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: .*the JSON"):
        caaseg.load_model(saved)


def test_missing_sources_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"contains no model; expected a directory with config\.json and model\.safetensors"
    ):
        caaseg.load_model(tmp_path)
    with pytest.raises(ValueError, match=r"no such model; expected a run, a model directory, an \.onnx file or hf://"):
        caaseg.load_model(tmp_path / "nothing" / "here")
    build().save_pretrained(tmp_path / "run" / "best")
    with pytest.raises(ValueError, match=r"run: an unfinished run; resume it with --resume auto, or .*best$"):
        caaseg.load_model(tmp_path / "run")
    caaseg.load_model(tmp_path / "run" / "best")

    def unreachable(*arguments: Any, **options: Any) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("caaseg.models.saving.snapshot_download", unreachable)
    with pytest.raises(
        ValueError, match=r"cannot be downloaded from the hub \(no route to host\); check the name and the network"
    ):
        caaseg.load_model("hf://somebody/something")


def test_a_hub_model_is_fetched_without_its_code(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fetch(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(saved)

    monkeypatch.setattr("caaseg.models.saving.snapshot_download", fetch)
    assert caaseg.load_model("hf://somebody/something").config.head == "caa"
    assert asked == {
        "name": "somebody/something",
        "allow_patterns": ["config.json", "model.safetensors", "pytorch_model.bin"],
        "revision": None,
    }


def test_files_of_unknown_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.h5").write_bytes(b"HDF")
    with pytest.raises(ValueError, match=r"weights\.h5: unknown suffix \.h5; expected \.safetensors or one of \.pt"):
        read_tensors(tmp_path / "weights.h5")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list\.pt: expected a dictionary from names to tensors, found other"):
        read_tensors(tmp_path / "list.pt")
    torch.save({1: torch.zeros(2)}, tmp_path / "numbers.pt")
    with pytest.raises(ValueError, match=r"numbers\.pt: expected a dictionary from names to tensors"):
        read_tensors(tmp_path / "numbers.pt")
    with pytest.raises(ValueError, match="is a directory; expected weights"):
        read_tensors(tmp_path)
    with pytest.raises(ValueError, match=r"gone\.pt: no such file"):
        read_tensors(tmp_path / "gone.pt")


def test_saving_again_replaces_weights_config_and_card(saved: Path) -> None:
    build("fcn", classes=["a|b", "c\nd", "e"]).save_pretrained(saved)
    assert caaseg.load_model(saved).config.head == "fcn"
    assert {path.name for path in saved.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    card = (saved / "README.md").read_text()
    assert "# fcn on test_resnet, 3 classes" in card
    assert "| 0 | a\\|b |" in card
    assert "| 1 | c d |" in card


def test_a_save_that_fails_leaves_the_old_model_as_it_was(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError("no space left on device")

    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    monkeypatch.setattr("caaseg.models.saving.save_file", full)
    with pytest.raises(OSError, match="no space left"):
        build("fcn").save_pretrained(saved)
    assert before == {path.name: path.read_bytes() for path in saved.iterdir()}


def test_pushing_uploads_what_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    uploaded: dict[str, Any] = {}

    class Hub:
        def __init__(self, *arguments: Any, **options: Any) -> None: ...

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            return type("Url", (), {"repo_id": repo_id})()

        def upload_folder(self, repo_id: str, folder_path: Path, **options: Any) -> str:
            uploaded.update(repo_id=repo_id, files={path.name for path in Path(folder_path).iterdir()})
            return "done"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Hub)
    build().push_to_hub("somebody/something")
    assert uploaded == {"repo_id": "somebody/something", "files": {"model.safetensors", "config.json", "README.md"}}


@pytest.mark.parametrize("kind", ["complex", "integer"])
def test_tensors_of_another_kind_are_refused(saved: Path, kind: str) -> None:
    state = load_file(saved / "model.safetensors")
    weight = state["classifier.weight"]
    state["classifier.weight"] = weight.to(torch.complex64) if kind == "complex" else weight.to(torch.int32)
    (saved / "model.safetensors").unlink()
    torch.save(state, saved / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"1 of another dtype: classifier\.weight"):
        caaseg.load_model(saved)
