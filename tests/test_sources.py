import gzip
import hashlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from retrieval_gym.datasets import load_dataset
from retrieval_gym.datasets.readers import read_jsonl, read_records
from retrieval_gym.datasets.sources import SOURCES, cache_folder, find, find_local

DATA = Path(__file__).parent / "data"
MUSIQUE = SOURCES["musique"]
DEV, TRAIN = MUSIQUE.files["dev"], MUSIQUE.files["train"]


class Hub:
    """A server that answers as the Hub does for the files put into it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.cut = False
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self._answer()

            def do_GET(self) -> None:
                data = self._answer()
                if data is not None:
                    hub.fetched.append(self.path)
                    self.wfile.write(data[: len(data) // 2] if hub.cut else data)

            def _answer(self) -> bytes | None:
                data = hub.files.get(self.path)
                self.send_response(404 if data is None else 200)
                if data is None:
                    self.send_header("X-Error-Code", "EntryNotFound")
                else:
                    self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
                    self.send_header("X-Repo-Commit", "a" * 40)
                self.send_header("Content-Length", str(len(data or b"")))
                self.end_headers()
                return data

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def put(self, name: str, file: str, data: bytes, revision: str | None = None) -> None:
        source = SOURCES[name]
        self.files[f"/datasets/{source.hub_repo}/resolve/{revision or source.hub_revision}/{file}"] = data


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data folder, an empty cache, no Hub."""
    monkeypatch.delenv("RETRIEVAL_GYM_DATA", raising=False)
    monkeypatch.delenv("RETRIEVAL_GYM_HUB_REVISION", raising=False)
    monkeypatch.setenv("RETRIEVAL_GYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub")
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def copy(target: Path, name: str = f"musique/{DEV}") -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    data = (DATA / name).read_bytes()
    target.write_bytes(gzip.compress(data) if target.suffix == ".gz" else data)
    return target


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("folder", ["", "musique"])
def test_explicit_folder(tmp_path: Path, folder: str, ending: str) -> None:
    file = copy(tmp_path / "data" / folder / f"{DEV}{ending}")
    assert find("musique", "dev", tmp_path / "data").files == (file,)


def test_explicit_file(tmp_path: Path) -> None:
    file = copy(tmp_path / "anything.jsonl")
    found = find("musique", "dev", file)
    assert found.files == (file,) and dict(found.siblings) == {"dev": (file,)}


def test_order_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy(cache_folder() / "musique" / DEV)
    assert find("musique", "dev").place == str(cache_folder())
    copy(tmp_path / "env" / "musique" / DEV)
    monkeypatch.setenv("RETRIEVAL_GYM_DATA", str(tmp_path / "env"))
    assert find("musique", "dev").place == str(tmp_path / "env")
    copy(tmp_path / "path" / DEV)
    assert find("musique", "dev", tmp_path / "path").place == str(tmp_path / "path")


def test_explicit_path_is_the_only_place(tmp_path: Path) -> None:
    copy(cache_folder() / "musique" / DEV)
    with pytest.raises(FileNotFoundError, match=r"absent\.txt \(absent\)"):
        find("musique", "dev", tmp_path / "absent.txt")


def test_data_folder_without_the_dataset_falls_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "dev.json").write_text("[]")  # somebody's dev.json is not 2WikiMultihopQA's
    monkeypatch.setenv("RETRIEVAL_GYM_DATA", str(tmp_path / "env"))
    assert find_local("2wiki", "dev") is None
    copy(cache_folder() / "2wiki" / "dev.json", "2wiki/dev.json")
    assert find("2wiki", "dev").place == str(cache_folder())


def test_missing_data_say_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRIEVAL_GYM_DATA", str(tmp_path / "env"))
    with pytest.raises(FileNotFoundError) as error:
        load_dataset("hotpotqa", "train")
    message = str(error.value)
    for part in (
        "hotpotqa/hotpot_train_v1.1.json",
        str(tmp_path / "env"),
        str(cache_folder()),
        "HF_HUB_OFFLINE is set",
        "https://hotpotqa.github.io",
        "hf download hotpotqa/hotpot_qa distractor/train-00000-of-00002.parquet distractor/train-00001-of-00002",
        SOURCES["hotpotqa"].hub_revision,
    ):
        assert part in message


@pytest.mark.parametrize("name", ["musique", "hotpotqa", "2wiki"])
def test_no_test_split(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="No labelled test split is published"):
        load_dataset(name, "test")


def test_test_split_from_a_file_of_ones_own(tmp_path: Path) -> None:
    copy(tmp_path / "2wiki" / "test.json", "2wiki/dev.json")
    assert len(load_dataset("2wiki", "test", path=tmp_path)) == 4


def test_hub_jsonl(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.put("musique", DEV, (DATA / "musique" / DEV).read_bytes())
    dataset = load_dataset("musique", "dev")
    assert dataset.questions == load_dataset("musique", "dev", path=DATA).questions
    assert dataset.source == f"hf://datasets/bdsaglam/musique@{MUSIQUE.hub_revision}"
    assert f"fetching bdsaglam/musique/{DEV}" in capsys.readouterr().err
    load_dataset("musique", "dev")
    assert len(hub.fetched) == 1  # the second time comes from the cache
    files = [file.name for file in cache_folder().rglob("*") if file.is_file()]
    assert files == [DEV]


def test_hub_parquet_rows(hub: Hub, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = json.loads((DATA / "hotpotqa/hotpot_dev_distractor_v1.json").read_text())
    rows = [
        {
            "id": r["_id"],
            "question": r["question"],
            "answer": r["answer"],
            "type": r["type"],
            "level": r["level"],
            "supporting_facts": {
                "title": [title for title, _ in r["supporting_facts"]],
                "sent_id": [sentence for _, sentence in r["supporting_facts"]],
            },
            "context": {
                "title": [title for title, _ in r["context"]],
                "sentences": [sentences for _, sentences in r["context"]],
            },
        }
        for r in records
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (file,) = SOURCES["hotpotqa"].hub_files["dev"]
    hub.put("hotpotqa", file, (tmp_path / "rows.parquet").read_bytes())
    fetched, official = load_dataset("hotpotqa", "dev"), load_dataset("hotpotqa", "dev", path=DATA)
    assert fetched.questions == official.questions
    assert fetched.corpus.fingerprint == official.corpus.fingerprint
    assert fetched.dropped == official.dropped


def test_hub_shards_are_read_in_order(hub: Hub, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = json.loads((DATA / "2wiki/dev.json").read_text())
    for i, file in enumerate(SOURCES["2wiki"].hub_files["train"]):
        rows = [
            {
                "id": r["_id"],
                **{key: r[key] for key in ("question", "answer", "type")},
                "supporting_facts": {
                    "title": [t for t, _ in r["supporting_facts"]],
                    "sent_id": [0] * len(r["supporting_facts"]),
                },
                "context": {"title": [t for t, _ in r["context"]], "sentences": [s for _, s in r["context"]]},
            }
            for r in records[2 * i : 2 * i + 2]
        ]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "shard.parquet")
        hub.put("2wiki", file, (tmp_path / "shard.parquet").read_bytes())
    dataset = load_dataset("2wiki", "train")
    assert dataset.questions == load_dataset("2wiki", "dev", path=DATA).questions


def test_corpus_form_fetches_every_split(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (TRAIN, DEV):
        hub.put("musique", file, (DATA / "musique" / file).read_bytes())
    load_dataset("musique", "dev")
    assert len(hub.fetched) == 1
    fingerprints = {load_dataset("musique", split, form="corpus").corpus.fingerprint for split in ("dev", "train")}
    assert fingerprints == {load_dataset("musique", "dev", path=DATA, form="corpus").corpus.fingerprint}
    assert len(hub.fetched) == 2


def test_half_a_hub_download_is_no_corpus(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.put("musique", DEV, (DATA / "musique" / DEV).read_bytes())
    load_dataset("musique", "dev")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(load_dataset("musique", "dev")) == 1
    with pytest.raises(FileNotFoundError, match=TRAIN):
        load_dataset("musique", "dev", form="corpus")


def test_revision(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.put("musique", DEV, (DATA / "musique" / DEV).read_bytes(), revision="main")
    with pytest.raises(FileNotFoundError, match=f"at {MUSIQUE.hub_revision}: 404"):
        find("musique", "dev")
    assert find("musique", "dev", revision="main").place.endswith("@main")
    monkeypatch.setenv("RETRIEVAL_GYM_HUB_REVISION", "main")
    assert find("musique", "dev").place.endswith("@main")
    assert len(hub.fetched) == 1


def test_broken_transfer_leaves_nothing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.put("musique", DEV, (DATA / "musique" / DEV).read_bytes())
    hub.cut = True
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client waits between its retries
    with pytest.raises(FileNotFoundError, match="did not give"):
        find("musique", "dev")
    assert not [file for file in cache_folder().rglob("*") if file.is_file()]
    hub.cut = False
    assert find("musique", "dev").files[0].read_bytes() == (DATA / "musique" / DEV).read_bytes()


def test_nobody_answers(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FileNotFoundError, match="http://127.0.0.1:9 did not give bdsaglam/musique") as error:
        find("musique", "dev")
    assert isinstance(error.value.__cause__, ConnectionError)


@pytest.mark.parametrize("reader", [read_jsonl, read_records])
def test_encoding_of_jsonl(tmp_path: Path, reader: Callable) -> None:
    file = tmp_path / "file.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + '{"a": "Wisła 🌊"}\r\n\r\n{"a": "x\u2028y"}\r\n'.encode())
    assert [record for _, record in reader(file)] == [{"a": "Wisła 🌊"}, {"a": "x\u2028y"}]
    assert [where for where, _ in reader(file)] == [f"{file}, line 1", f"{file}, line 3"]


def _text(folder: Path, text: str, name: str = "file.json") -> Path:
    (folder / name).write_bytes(text.encode())
    return folder / name


def test_json_array_and_json_that_is_jsonl(tmp_path: Path) -> None:
    array = _text(tmp_path, '\ufeff[{"a": 1},\r\n {"a": 2}]')
    assert list(read_records(array)) == [(f"{array}, record 1", {"a": 1}), (f"{array}, record 2", {"a": 2})]
    lines = _text(tmp_path, '{"a": 1}\n{"a": 2}\n', "lines.json")
    assert [record for _, record in read_records(lines)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1}\n{"a": \n', "line 2: not JSON"),
        (b'{"a": 1}\n"text"\n', "line 2: must be a JSON object, got 'text'"),
        (b'{"a": 1}\n\n{"a": "\xff"}\n', "line 3: not UTF-8"),
        (b"", "is empty"),
        (b"\r\n \n", "is empty"),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_malformed_jsonl(tmp_path: Path, data: bytes, message: str, ending: str) -> None:
    file = tmp_path / f"file.jsonl{ending}"
    file.write_bytes(gzip.compress(data) if ending else data)
    with pytest.raises(ValueError, match=message) as error:
        list(read_records(file))
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("file.json", b"[{]", "not JSON .* at column 3"),
        ("file.json", b'[\n{"a": 1},\n{]', "not JSON .* at line 3, column 2"),
        ("file.json", b'[\n{"a": "\xff"}]', "line 2: not UTF-8"),
        ("file.json", b"[]", "holds no record"),
        ("file.json", b"", "holds no record"),
        ("file.json", b"[3]", "record 1: must be a JSON object, got 3"),
        ("file.json.gz", b"[3]", "not a whole gzip file"),
        ("file.jsonl.gz", gzip.compress(b'{"a": "' + bytes(range(65, 91)) * 9 + b'"}')[:-9], "not a whole gzip file"),
        ("file.csv", b"a,b", "cannot tell the format"),
        ("file.parquet", b"PAR", "not a parquet file"),
    ],
)
def test_malformed_files(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        list(read_records(tmp_path / name))
    assert name in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    for name in ("a.json", "a.jsonl", "a.jsonl.gz"):
        with pytest.raises(FileNotFoundError):
            list(read_records(tmp_path / name))
