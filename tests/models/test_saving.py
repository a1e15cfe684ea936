"""Saved models load unchanged; damaged files and files that could run code are rejected."""

import json
import math
import os
import pickle
import re
import resource
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import caaseg
from caaseg.config import ModelConfig
from caaseg.errors import CaasegError
from caaseg.models import HEADS, load_model
from caaseg.models.backbones import TimmBackbone
from caaseg.models.weights import load_backbone_weights, read_tensors
from tests.small_models import small_model

CLASSES, PALETTE = ["road", "tree", "sky"], [(128, 64, 128), (0, 128, 0), (70, 130, 180)]


def build(head: str = "caa", **options: Any) -> caaseg.Segmenter:
    small = {"backbone": "test_resnet", "num_classes": 3, "channels": 16, "key_channels": 4, "gate_width": 8}
    model = caaseg.create_model(head, **{**small, "classes": CLASSES, "palette": PALETTE, **options})
    model(torch.randn(2, 3, 33, 33))  # updates the initial batch norm statistics
    return model.eval()


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "model"
    build().save_pretrained(directory)
    return directory


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """Return the directory of a saved model that the test may change."""
    return shutil.copytree(saved_once, tmp_path / "model")


@pytest.mark.parametrize("head", HEADS)
def test_a_saved_and_loaded_model_is_bit_identical(head: str, tmp_path: Path) -> None:
    model = build(head, aux=True, decoder=True)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    assert not loaded.training
    mine, theirs = model.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    images = torch.randn(2, 3, 40, 51)
    assert torch.equal(model(images).logits, loaded(images).logits)


def test_a_saved_model_consists_of_weights_config_and_card(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    config = json.loads((saved / "config.json").read_text())
    assert config["classes"] == CLASSES
    assert config["palette"] == [list(color) for color in PALETTE]
    card = (saved / "README.md").read_text()
    assert "# caa on test_resnet, 3 classes" in card
    assert "| 1 | tree | 0, 128, 0 |" in card
    assert "library_name: caaseg" in card
    assert card.startswith("---\n")


def test_models_saved_before_an_option_existed_are_loaded(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    for name in ("input_upsampling", "stages"):
        del config[name]
    (saved / "config.json").write_text(json.dumps(config))
    assert load_model(saved).config == build().config


@pytest.mark.parametrize("variant", ["standard", "authors"])
def test_a_model_of_an_older_version_keeps_the_backbone_of_that_version(variant: str, tmp_path: Path) -> None:
    model = build("fcn", backbone="resnet18", resnet_variant=variant, dilation="timm", output_stride=8)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("dilation", "top_features", "min_size"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    images = torch.randn(1, 3, 34, 40)
    assert torch.equal(load_model(tmp_path)(images).logits, model(images).logits)


def test_the_card_states_stages_and_input_upsampling_if_used(saved: Path, tmp_path: Path) -> None:
    assert "backbone `test_resnet`, output stride\n16. The heads" in (saved / "README.md").read_text()
    model = build(stages=3, input_upsampling=1.5)
    model.save_pretrained(tmp_path / "other")
    card = (tmp_path / "other" / "README.md").read_text()
    assert "backbone `test_resnet` up to stage 3, output stride\n16, images upsampled 1.5 times. The heads" in card
    loaded, images = load_model(tmp_path / "other"), torch.randn(1, 3, 40, 51)
    assert (loaded.config.stages, loaded.config.input_upsampling) == (3, 1.5)
    assert torch.equal(model(images).logits, loaded(images).logits)


def test_all_files_have_the_same_permissions(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_half_precision_is_saved_and_loaded_as_float32(tmp_path: Path) -> None:
    model = build().to(memory_format=torch.channels_last).half()  # type: ignore[call-overload]
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["classifier.weight"].dtype == torch.float16
    loaded = load_model(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert loaded.classifier.weight.dtype == torch.float32
    assert loaded(torch.randn(1, 3, 33, 40)).logits.isfinite().all()


def test_run_directories_and_from_pretrained_load_the_model(saved: Path) -> None:
    assert load_model(saved.parent).config == load_model(saved).config
    assert caaseg.Segmenter.from_pretrained(saved).config == load_model(str(saved)).config


def test_a_pytorch_file_is_read_without_running_code(saved: Path) -> None:
    state = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    torch.save(state, saved / "pytorch_model.bin")
    loaded = load_model(saved)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("head", "classifiers"),
    [
        ("danet", ["branch_classifiers.spatial", "branch_classifiers.channel"]),
        ("encnet", ["head.classifier"]),
        ("ocr", ["head.classifier"]),
    ],
)
def test_all_weights_but_the_classifiers_are_loaded_for_another_number_of_classes(
    head: str, classifiers: list[str], tmp_path: Path
) -> None:
    model = build(head, aux=True)
    model.save_pretrained(tmp_path)
    message = "was trained on 3 classes and is loaded with 7: the classifiers are initialized anew"
    with pytest.warns(UserWarning, match=message):
        loaded = load_model(tmp_path, num_classes=7)
    assert loaded.config.num_classes == 7
    assert loaded.config.classes is None
    changed = {name for name, tensor in loaded.state_dict().items() if not _equal(tensor, model.state_dict()[name])}
    assert changed == {
        f"{name}.{kind}" for name in ("classifier", "aux.2", *classifiers) for kind in ("weight", "bias")
    }
    assert loaded(torch.randn(1, 3, 33, 33)).logits.shape == (1, 7, 33, 33)


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second)


def test_the_same_number_of_classes_changes_nothing(saved: Path) -> None:
    assert load_model(saved, num_classes=3).config.classes == tuple(CLASSES)


class Bomb:
    """Unpickling it would create a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch exploded",)


def test_a_pickle_that_would_run_code_is_rejected(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (saved / "model.safetensors").unlink()
    for write in (lambda path: torch.save({"classifier.weight": Bomb()}, path), _plain_pickle):
        write(saved / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"pytorch_model\.bin: refused, because it contains more than tensors"):
            load_model(saved)
    assert not (tmp_path / "exploded").exists()


def _plain_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb()))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_rejected(saved: Path, name: str, share: float) -> None:
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
        load_model(saved)


def change_config(directory: Path, **changed: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head": "transformer"}, "config.json: head is 'transformer'; expected fcn, axial"),
        ({"num_classes": 4, "classes": None, "palette": None}, "the weights do not fit the model; 2 of another shape"),
        ({"num_classes": "many"}, "num_classes"),
        ({"color": "blue"}, "color"),
        ({"output_stride": 4}, "output_stride"),
        ({"backbone": "resnet18"}, "the weights do not fit the model; "),
        ({"decoder": True}, "the weights do not fit the model; "),
        ({"classes": ["a"]}, "classes has 1 entries, but num_classes is 3"),
        ({"backbone": None}, "config.json: backbone is None; expected a valid string"),
        ({"backbone": "os.system"}, "config.json: backbone 'os.system' is not a timm model"),
        ({"num_classes": 10**12, "classes": None, "palette": None}, "expected less than or equal to 255"),
        ({"gate_layers": 10**6}, "gate_layers is 1000000; expected less than or equal to 100"),
        ({"gate_layers": 0}, "config.json: gate_layers is 0; expected greater than or equal to 1"),
        ({"channels": 60_000}, "the weights do not fit the model; "),
        ({"__path__": 3}, "config.json: "),
        ({"multi_grid": [0]}, "multi_grid is [0]; expected greater than or equal to 1"),
        ({"palette": [[300, 0, 0]] * 3}, "expected less than or equal to 255"),
    ],
)
def test_an_invalid_config_is_rejected(saved: Path, changed: dict[str, Any], message: str) -> None:
    change_config(saved, **changed)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(saved)


NESTED = [f'{{"head": "caa", "palette": {"[" * depth}{"]" * depth}}}' for depth in (500, 3000)]
NO_CONFIGS = ["", "{", "[1, 2]", "\x00\x01", '"caa"', "null", "[" * 100_000, "1" * 5000, *NESTED]


@pytest.mark.parametrize("text", NO_CONFIGS, ids=range(len(NO_CONFIGS)))
def test_a_config_that_is_not_a_json_object_is_rejected(saved: Path, text: str) -> None:
    (saved / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: .*the JSON"):
        load_model(saved)


def test_errors_distinguish_missing_and_unfinished_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"contains no model; expected a directory with config\.json and model\.safetensors"
    ):
        load_model(tmp_path)
    with pytest.raises(ValueError, match=r"no such model; expected a run, a model directory, an \.onnx file, hf://"):
        load_model(tmp_path / "nothing" / "here")
    build().save_pretrained(tmp_path / "run" / "best")
    with pytest.raises(ValueError, match=r"run: an unfinished run; resume it with --resume auto, or .*best$"):
        load_model(tmp_path / "run")
    load_model(tmp_path / "run" / "best")

    def unreachable(*arguments: Any, **options: Any) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(
        ValueError, match=r"cannot be downloaded from the hub \(no route to host\); check the name and the network"
    ):
        load_model("hf://somebody/something")


def test_only_config_and_weights_are_downloaded_from_the_hub(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: dict[str, Any] = {}

    def fetch(name: str, **options: Any) -> str:
        requested.update(options, name=name)
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert load_model("hf://somebody/something").config.head == "caa"
    assert requested == {
        "name": "somebody/something",
        "allow_patterns": ["config.json", "model.safetensors", "pytorch_model.bin"],
        "revision": None,
    }


def test_files_of_unknown_formats_are_rejected(tmp_path: Path) -> None:
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
    assert load_model(saved).config.head == "fcn"
    assert {path.name for path in saved.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    card = (saved / "README.md").read_text()
    assert "# fcn on test_resnet, 3 classes" in card
    assert "| 0 | a\\|b |" in card
    assert "| 1 | c d |" in card


def test_weights_without_read_permission_are_not_called_damaged(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)  # the superuser may read all files
    with pytest.raises(PermissionError):
        read_tensors(saved / "model.safetensors")


def test_class_names_that_no_file_can_store_are_refused() -> None:
    with pytest.raises(CaasegError, match=r"classes has the name '\\ud800'; expected valid Unicode"):
        ModelConfig.read({"head": "fcn", "backbone": "resnet18", "num_classes": 1, "classes": ["\ud800"]})


def test_a_failed_save_leaves_the_old_model_unchanged(saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    model, limits = build("fcn"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # larger files cannot be written
    try:
        with pytest.raises(SafetensorError, match="File too large"):
            model.save_pretrained(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert before == {path.name: path.read_bytes() for path in saved.iterdir()}


def test_push_to_hub_uploads_the_saved_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def change_weights(directory: Path, change: Callable[[Tensor], Tensor]) -> None:
    """Change the weights of the classifier in the file."""
    state = load_file(directory / "model.safetensors")
    state["classifier.weight"] = change(state["classifier.weight"])
    save_file(state, directory / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_other_precisions_are_loaded_in_float32(saved: Path, dtype: torch.dtype) -> None:
    change_weights(saved, lambda weight: weight.to(dtype))
    stored = load_file(saved / "model.safetensors")["classifier.weight"]
    model = load_model(saved)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    assert torch.equal(model.classifier.weight, stored.float())
    assert model(torch.randn(1, 3, 33, 40)).logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_weights_are_refused(saved: Path, dtype: torch.dtype) -> None:
    change_weights(saved, lambda weight: weight.to(dtype))
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(CaasegError, match=rf"1 of another dtype: classifier\.weight {name} instead of float32"):
        load_model(saved)


@pytest.mark.parametrize(
    ("value", "dtype"), [(math.nan, torch.float32), (-math.inf, torch.float16), (1e300, torch.float64)]
)
def test_weights_that_are_not_finite_are_refused_on_load(saved: Path, value: float, dtype: torch.dtype) -> None:
    change_weights(saved, lambda weight: weight.to(dtype).index_fill(0, torch.tensor([1]), value))
    message = r"model\.safetensors: 1 tensors with NaN or infinite values: classifier\.weight; use another checkpoint"
    with pytest.raises(CaasegError, match=message):
        load_model(saved)


def test_weights_that_are_not_finite_are_not_saved(saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    model = build()
    model.get_buffer("backbone.net.bn1.running_var")[0] = math.inf
    message = r"not saved: 1 tensors with NaN or infinite values: backbone\.net\.bn1\.running_var; train again with"
    with pytest.raises(CaasegError, match=message):
        model.save_pretrained(saved)
    assert before == {path.name: path.read_bytes() for path in saved.iterdir()}


def test_backbone_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    backbone = build().backbone
    assert isinstance(backbone, TimmBackbone)
    state = {name: tensor.clone() for name, tensor in backbone.net.state_dict().items()}
    state["bn1.weight"][0] = math.nan
    save_file(state, tmp_path / "backbone.safetensors")
    with pytest.raises(CaasegError, match=r"1 tensors with NaN or infinite values: bn1\.weight; download it again"):
        load_backbone_weights(backbone, tmp_path / "backbone.safetensors")


def test_a_small_pytorch_file_cannot_allocate_much_memory(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.zeros(1).expand(2**16, 2**16)}, path)  # stride 0: 4 bytes in the file
    message = r"weights\.pt: refused, because its tensors take 17,179,869,184 bytes, but the file has "
    with pytest.raises(CaasegError, match=message):
        read_tensors(path)
    shared = torch.zeros(10_000)
    torch.save({str(k): shared for k in range(100)}, path)
    with pytest.raises(CaasegError, match=r"weights\.pt: refused, because its tensors take 4,000,000 bytes, but"):
        read_tensors(path)


def test_a_compressed_pytorch_file_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.zeros(100_000)}, tmp_path / "plain.pt")
    assert read_tensors(tmp_path / "plain.pt")["a"].shape == (100_000,)
    path = tmp_path / "packed.pt"
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the file was unpacked"))
    with pytest.raises(CaasegError, match=r"packed\.pt: refused, because it is compressed: [\d,]+ bytes would become"):
        read_tensors(path)


@pytest.mark.parametrize("kind", ["complex", "integer"])
def test_complex_and_integer_weights_are_rejected(saved: Path, kind: str) -> None:
    state = load_file(saved / "model.safetensors")
    weight = state["classifier.weight"]
    state["classifier.weight"] = weight.to(torch.complex64) if kind == "complex" else weight.to(torch.int32)
    (saved / "model.safetensors").unlink()
    torch.save(state, saved / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"1 of another dtype: classifier\.weight"):
        load_model(saved)


def test_a_directory_without_a_model_does_not_hide_a_shipped_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "camvid").mkdir()  # the dataset, for example
    assert caaseg.load_model("camvid").config.num_classes == 11
    small_model("fcn").save_pretrained(tmp_path / "camvid")
    assert caaseg.load_model("camvid").config.num_classes == 5
